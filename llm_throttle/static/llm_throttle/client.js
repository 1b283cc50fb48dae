/**
 * One chat through a throttled view or consumer: the wait in line, the reply, the refusal.
 *
 *     import { throttledChat } from "./llm_throttle/client.js";
 *
 *     const outcome = await throttledChat({
 *       url: "/chat/", // or ws://…, wss://…
 *       message: "Hello",
 *       onPosition: ({ position, eta }) => …,
 *       onToken: (text) => …,
 *       onRefused: ({ detail, retryAt }) => …,
 *     });
 *
 * A lost connection is taken up again with the ticket while the chat waits, so that it keeps its
 * place; a reply that broke off is not, because that would be a second call to the model.
 *
 * @module
 */

import { forgetPlace, keepPlace, placeOf } from "./places.js";
import { Watch, backoff, retryDelay, sleep } from "./timing.js";
import { ConnectionLost, overFetch, overSocket } from "./transports.js";

/**
 * @typedef {object} ChatOptions
 * @property {string} url
 * @property {string} [message]                Short for `body: { message }`.
 * @property {Record<string, unknown>} [body]  What the view reads, sent as JSON.
 * @property {Record<string, string>} [headers]  Such as X-CSRFToken; sockets cannot send any.
 * @property {"sse" | "socket"} [transport]    By the address: a socket for ws: and wss:.
 * @property {string} [key]      Names the place in line in this tab; the address where left out.
 *                               A second chat with the same key ends the first.
 * @property {AbortSignal} [signal]            Aborting gives the place or the slot back.
 * @property {number} [retries]  How often a refusal is tried again by itself; 0 where left out.
 * @property {number} [patience] Seconds to go on trying to reconnect; 60 where left out.
 * @property {(position: Position) => void} [onPosition]
 * @property {(grant: Grant) => void} [onGranted]
 * @property {(text: string) => void} [onToken]
 * @property {(event: {event: string, data: string}) => void} [onEvent]  Any other event of yours.
 * @property {(outcome: Outcome) => void} [onDone]
 * @property {(refusal: Refusal) => void} [onRefused]
 * @property {(outcome: Outcome) => void} [onError]
 * @property {(loss: Loss) => void} [onLost]   The connection was lost; it is tried again.
 * @property {() => void} [onStalled]          Nothing has been heard of the server for 5 seconds.
 */

/**
 * @typedef {object} Position
 * @property {number} position   1 is next. Never rises without a cause.
 * @property {number} ahead      How many would be let in before, as it is right now.
 * @property {[number, number] | null} eta  Seconds, from and to; null where nothing is known.
 * @property {string} [cause]    Why the position may have risen: edit, reconnect, recovery.
 * @property {string} ticket
 * @property {string} upstream
 */

/**
 * @typedef {object} Grant
 * @property {string} ticket
 * @property {string} tier
 * @property {number | null} waitedMs
 */

/**
 * @typedef {object} Refusal
 * @property {"refused"} type
 * @property {string} reason
 * @property {string} detail
 * @property {number} status
 * @property {number | null} retryAfter  Seconds, no less than the server said; null: do not.
 * @property {number | null} retryAt     The same as an instant, in milliseconds since 1970.
 * @property {boolean} willRetry         Whether it will be tried again by itself.
 */

/** @typedef {{attempt: number, retryAt: number}} Loss */

/**
 * How a chat ended. Kinds of errors: `lost` (no connection), `broken` (the reply broke off),
 * `moved` (the ticket goes on in another tab), `foreign_ticket` (it is another user's), `http`
 * (another answer, with its status), else the server's code, or `reply` where it gave none.
 *
 * @typedef {Refusal
 *   | {type: "done"}
 *   | {type: "cancelled"}
 *   | {type: "error", kind: string, detail: string, status?: number}} Outcome
 */

// What shows that a connection works; that it could be opened does not.
const ALIVE = new Set(["position", "alive", "keep_alive"]);

/** @type {Map<string, Chat>} */
const running = new Map();

/**
 * Send one message, wait in line, pass the reply on. Resolves when it is over, whatever the end;
 * rejects only with what a callback has thrown.
 *
 * @param {ChatOptions} options
 * @returns {Promise<Outcome>}
 */
export async function throttledChat(options) {
  const chat = new Chat(options);
  running.get(chat.key)?.cancel();
  running.set(chat.key, chat);
  try {
    return await chat.run();
  } finally {
    chat.close();
    if (running.get(chat.key) === chat) running.delete(chat.key);
  }
}

/**
 * The chat that was waiting under this key when the page went away, to be sent again as it is:
 * `throttledChat({ ...interruptedChat(key), key, … })` finds its place.
 *
 * @param {string} key
 * @returns {{url: string, body: Record<string, unknown>} | null}
 */
export function interruptedChat(key) {
  const place = placeOf(key);
  return place && { url: place.url, body: place.body };
}

class Chat {
  #ticket = "";
  #isGranted = false;
  #hasTokens = false;
  #hasKeepAlive = false;
  #lowest = Infinity;
  #losses = 0;
  #lostAt = Infinity;
  #retries = 0;
  #end = new AbortController();
  #onAbort = () => this.cancel();

  /** @param {ChatOptions} options */
  constructor(options) {
    this.options = { headers: {}, retries: 0, patience: 60, ...options };
    this.body = options.body ?? { message: options.message };
    this.key = options.key ?? options.url;
    this.transport = isForSocket(options) ? overSocket : overFetch;
  }

  cancel() {
    this.#end.abort();
  }

  /** Let go of everything, also where a callback has thrown. */
  close() {
    this.options.signal?.removeEventListener("abort", this.#onAbort);
    this.#end.abort();
  }

  // From the first connection to the outcome.

  async run() {
    this.#listenForAbort();
    this.#findPlace();
    for (;;) {
      const outcome = await this.#connect();
      const pause = this.#pauseAfter(outcome);
      if (pause === null) return this.#settle(outcome);
      this.#tellPause(outcome, pause);
      await sleep(pause, this.#end.signal);
    }
  }

  #listenForAbort() {
    const { signal } = this.options;
    if (signal?.aborted) this.cancel();
    signal?.addEventListener("abort", this.#onAbort);
  }

  /** A reload sends the same message again: it takes up the ticket that the tab has kept. */
  #findPlace() {
    const place = placeOf(this.key);
    const isSame =
      place?.url === this.options.url && JSON.stringify(place.body) === JSON.stringify(this.body);
    if (isSame) this.#ticket = place.ticket;
    else forgetPlace(this.key);
  }

  // One connection.

  async #connect() {
    if (this.#end.signal.aborted) return { type: "cancelled" };
    const attempt = new AbortController();
    const end = () => attempt.abort(this.#end.signal.reason);
    this.#end.signal.addEventListener("abort", end);
    const watch = new Watch(attempt, this.options.onStalled);
    try {
      for await (const message of this.transport(this.#call(attempt.signal))) {
        const outcome = this.#hear(message);
        if (outcome) return outcome;
        watch.heard(this.#hasKeepAlive);
      }
      return this.#ended();
    } catch (error) {
      return this.#failed(attempt.signal.aborted ? attempt.signal.reason : error);
    } finally {
      watch.stop();
      this.#end.signal.removeEventListener("abort", end);
      attempt.abort();
    }
  }

  #call(signal) {
    const { url, headers } = this.options;
    return { url, headers, body: this.body, ticket: this.#ticket, signal };
  }

  /** Act on one message; the outcome where it is the last. */
  #hear(message) {
    if (ALIVE.has(message.type)) this.#losses = 0;
    switch (message.type) {
      case "opened":
        return this.#hearOpened(message);
      case "position":
        return this.#hearPosition(message);
      case "granted":
        return this.#hearGranted(message);
      case "token":
        return this.#hearToken(message);
      case "event":
        return this.#hearEvent(message);
      case "refused":
        return this.#hearRefused(message);
      case "error":
        return this.#hearError(message);
      case "done":
        return { type: "done" };
    }
    return null;
  }

  #hearOpened(message) {
    this.#hasKeepAlive = message.hasKeepAlive;
    if (message.waited_ms !== null) this.#hearGranted(message); // such a head comes with a slot
  }

  #hearPosition(message) {
    this.#ticket = message.ticket ?? this.#ticket;
    keepPlace(this.key, { ticket: this.#ticket, url: this.options.url, body: this.body });
    if (message.cause) this.#lowest = Infinity;
    this.#lowest = Math.min(this.#lowest, message.position);
    this.options.onPosition?.({ eta: null, ...message, position: this.#lowest });
  }

  #hearGranted({ ticket = this.#ticket, tier = "", waited_ms: waitedMs = null }) {
    if (this.#isGranted) return;
    this.#isGranted = true;
    forgetPlace(this.key); // a ticket that was let in cannot be taken up again
    this.options.onGranted?.({ ticket, tier, waitedMs });
  }

  #hearToken({ text }) {
    this.#hearGranted({});
    this.#hasTokens = true;
    this.options.onToken?.(text);
  }

  #hearEvent({ event, data }) {
    this.#hearGranted({});
    this.options.onEvent?.({ event, data });
  }

  #hearRefused(message) {
    const { reason, detail = "", status, retry_after: least } = message;
    if (this.#isFromProxy(message)) return { type: "lost", detail };
    // A server that stops keeps the places of those who wait at it.
    if (reason === "shutting_down" && this.#mayReturn()) return { type: "lost", detail, least };
    if (status === 403 || status === 409) return { type: "error", kind: reason, detail, status };
    const retryAfter = retryDelay(least);
    const retryAt = Date.now() + retryAfter * 1000;
    return { detail, ...message, retryAfter, retryAt, willRetry: this.#mayRetry() };
  }

  #hearError({ code = "reply", detail = "The reply failed.", status }) {
    if (this.#isFromProxy({ status })) return { type: "lost", detail };
    return { type: "error", kind: status === undefined ? code : "http", detail, status };
  }

  /** Whether somebody answered for a server that is just starting again. */
  #isFromProxy({ status, upstream }) {
    return this.#mayReturn() && [502, 503, 504].includes(status) && upstream === undefined;
  }

  /** A clean end: a reply in another format than ours knows no `done`. */
  #ended() {
    if (this.#isGranted && !this.#hasTokens) return { type: "done" };
    return this.#failed(new ConnectionLost("The stream ended early."));
  }

  #failed(error) {
    if (this.#end.signal.aborted) return { type: "cancelled" };
    if (error instanceof ConnectionLost) return { type: "lost", detail: error.message };
    throw error;
  }

  // What comes after.

  /** Milliseconds until the next connection; null where this one was the last. */
  #pauseAfter(outcome) {
    if (outcome.type === "lost") return this.#pauseAfterLoss(outcome.least);
    if (outcome.type === "refused" && outcome.willRetry) return outcome.retryAfter * 1000;
    return null;
  }

  #pauseAfterLoss(least) {
    if (this.#losses === 0) this.#lostAt = Date.now();
    const isPatient = Date.now() - this.#lostAt < this.options.patience * 1000;
    if (!isPatient || !this.#mayReturn()) return null;
    const pause = backoff(this.#losses++);
    return least ? retryDelay(least) * 1000 : pause;
  }

  #mayReturn() {
    return this.#ticket !== "" && !this.#isGranted;
  }

  #mayRetry() {
    return this.#retries < this.options.retries;
  }

  #tellPause(outcome, pause) {
    this.#lowest = Infinity;
    if (outcome.type === "lost") {
      this.options.onLost?.({ attempt: this.#losses, retryAt: Date.now() + pause });
      return;
    }
    this.#retries++;
    this.#forgetTicket();
    this.options.onRefused?.(outcome);
  }

  #settle(outcome) {
    this.#forgetTicket();
    if (outcome.type === "lost") {
      const kind = this.#isGranted ? "broken" : "lost";
      outcome = { type: "error", kind, detail: outcome.detail };
    }
    if (outcome.type === "done") this.options.onDone?.(outcome);
    if (outcome.type === "refused") this.options.onRefused?.(outcome);
    if (outcome.type === "error") this.options.onError?.(outcome);
    return outcome;
  }

  /** The place stays where a newer chat with the same key has it. */
  #forgetTicket() {
    this.#ticket = "";
    if (running.get(this.key) === this) forgetPlace(this.key);
  }
}

/** @param {ChatOptions} options */
function isForSocket({ transport, url }) {
  return transport ? transport === "socket" : /^wss?:/i.test(url);
}
