/**
 * Two ways to a throttled chat. Each yields the server's messages and ends when the server ends;
 * a connection that breaks off throws ConnectionLost.
 *
 * @module
 */

import { readEvents, readText } from "./event_stream.js";

/**
 * @typedef {object} Call
 * @property {string} url
 * @property {Record<string, unknown>} body
 * @property {Record<string, string>} headers
 * @property {string} ticket     Empty for a new request.
 * @property {AbortSignal} signal
 */

/** @typedef {{type: string, [field: string]: any}} Message */

export class ConnectionLost extends Error {}

// Names of events that are ours even where the data does not repeat them.
const OURS = new Set(["position", "granted", "refused", "token", "done", "error"]);

// A refusal that is known in time comes with its own status, which logs and proxies see.
const ACCEPT = "text/event-stream, application/problem+json";

/**
 * POST the body, read an event stream.
 *
 * @param {Call} call
 * @returns {AsyncGenerator<Message, void, void>}
 */
export async function* overFetch(call) {
  const response = await post(call);
  if (!response.ok || response.body === null) {
    yield await noStream(response);
    return;
  }
  const isEvents = /^text\/event-stream/i.test(response.headers.get("Content-Type") ?? "");
  yield { ...opened(response.headers), hasKeepAlive: isEvents };
  try {
    yield* isEvents ? eventMessages(response.body) : textMessages(response.body);
  } catch (error) {
    throw lost(error);
  }
}

async function* eventMessages(body) {
  for await (const event of readEvents(body)) yield eventMessage(event);
}

/** Any other body: its text is the reply, its end the end of it. */
async function* textMessages(body) {
  for await (const text of readText(body)) yield { type: "token", text };
  yield { type: "done" };
}

async function post({ url, body, headers, ticket, signal }) {
  const all = new Headers({ Accept: ACCEPT, "Content-Type": "application/json" });
  for (const [name, value] of Object.entries(headers)) all.set(name, value);
  if (ticket) all.set("X-LLM-Throttle-Ticket", ticket);
  try {
    return await fetch(url, {
      method: "POST",
      headers: all,
      body: JSON.stringify(body),
      cache: "no-store",
      credentials: "same-origin",
      signal,
    });
  } catch (error) {
    throw lost(error);
  }
}

/** What fetch and a body's reader throw where the network is at fault is a TypeError. */
function lost(error) {
  return error instanceof TypeError ? new ConnectionLost(error.message, { cause: error }) : error;
}

function opened(headers) {
  return {
    type: "opened",
    ticket: headers.get("X-LLM-Throttle-Ticket") ?? "",
    tier: headers.get("X-LLM-Throttle-Tier") ?? "",
    waited_ms: numberOf(headers.get("X-LLM-Throttle-Waited-Ms")),
  };
}

function eventMessage({ event, data }) {
  if (event === "") return { type: "alive" };
  const value = parsed(data);
  if (OURS.has(value?.type)) return value;
  if (OURS.has(event)) return { ...value, type: event };
  return { type: "event", event, data };
}

/** A refusal before the stream began, or another answer that is none. */
async function noStream(response) {
  const problem = parsed(await response.text().catch(() => "")) ?? {};
  const { status } = response;
  const isRefusal = status === 429 || status === 503 || "reason" in problem;
  const wait = secondsUntil(response.headers.get("Retry-After")) ?? problem.retry_after ?? null;
  return {
    detail: `The server answered ${status}.`,
    ...problem,
    type: isRefusal ? "refused" : "error",
    reason: problem.reason ?? `http_${status}`,
    retry_after: wait,
    status,
  };
}

/** Retry-After is a number of seconds or, from some proxies, a date. */
function secondsUntil(header) {
  if (!header) return null;
  const seconds = /^\d+$/.test(header) ? Number(header) : (Date.parse(header) - Date.now()) / 1000;
  return Number.isFinite(seconds) ? Math.max(0, Math.ceil(seconds)) : null;
}

function numberOf(text) {
  return text === null || !Number.isFinite(Number(text)) ? null : Number(text);
}

/** The object that a JSON text spells, or null. */
function parsed(text) {
  try {
    const value = JSON.parse(text);
    return typeof value === "object" ? value : null;
  } catch {
    return null;
  }
}

/**
 * Send the body as the first message of a socket, read the messages that come back.
 *
 * @param {Call} call
 * @returns {AsyncGenerator<Message, void, void>}
 */
export async function* overSocket({ url, body, ticket, signal }) {
  const socket = new WebSocket(socketAddress(url, ticket));
  const inbox = new Inbox();
  const cancel = () => {
    if (socket.readyState === WebSocket.OPEN) socket.send(JSON.stringify({ type: "cancel" }));
    socket.close();
    inbox.fail(signal.reason);
  };
  socket.onopen = () => {
    inbox.put({ type: "opened", waited_ms: null, hasKeepAlive: true });
    socket.send(JSON.stringify({ type: "message", ...body }));
  };
  socket.onmessage = ({ data }) => inbox.put(parsed(data) ?? { type: "event", event: "", data });
  socket.onclose = ({ code, reason }) => inbox.fail(closed(code, reason));
  // A socket that the page's policy forbids brings an error and no close.
  socket.onerror = () => inbox.fail(closed(1006, ""));
  signal.addEventListener("abort", cancel);
  try {
    signal.throwIfAborted();
    for (;;) yield await inbox.take();
  } finally {
    signal.removeEventListener("abort", cancel);
    socket.close();
  }
}

function socketAddress(url, ticket) {
  const address = new URL(url, document.baseURI);
  address.protocol = address.protocol.replace(/^http/, "ws");
  if (ticket) address.searchParams.set("ticket", ticket);
  return address;
}

function closed(code, reason) {
  return new ConnectionLost(reason || `The socket was closed (${code}).`, { cause: code });
}

/** A queue of messages with an error at its end. */
class Inbox {
  /** @type {Message[]} */
  #messages = [];
  #error = null;
  #wake = () => {};

  put(message) {
    this.#messages.push(message);
    this.#wake();
  }

  fail(error) {
    this.#error ??= error;
    this.#wake();
  }

  async take() {
    while (this.#messages.length === 0) {
      if (this.#error) throw this.#error;
      await new Promise((resolve) => (this.#wake = resolve));
    }
    return this.#messages.shift();
  }
}
