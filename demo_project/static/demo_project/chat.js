"use strict";

const talk = document.getElementById("talk");
const form = document.getElementById("ask");
const field = document.getElementById("message");
const sendButton = document.getElementById("send");
const stopButton = document.getElementById("stop");
let leaving = null;

// What a refusal means for the person who reads it; the server's own words otherwise.
const REASONS = {
  user_depth: "You have as many messages running and waiting as your tier allows.",
  tier_full: "The line of your tier is full.",
  queue_full: "The line is full.",
  wait_too_long: "The wait would be longer than your tier allows.",
  wait_expired: "No slot came free in the time that your tier may wait.",
  paused: "The operator has paused this service.",
  unserviceable: "Your tier is not served here.",
  recovering: "The service is recovering.",
  backend_down: "The waiting room is out of order.",
  shutting_down: "This server is shutting down.",
};

function element(name, className, text) {
  const node = document.createElement(name);
  node.className = className;
  if (text !== undefined) node.textContent = text;
  return node;
}

function addTurn(className) {
  document.getElementById("empty")?.remove();
  return talk.appendChild(element("div", `turn ${className}`));
}

function scrollDown() {
  talk.scrollTop = talk.scrollHeight;
}

// One message, from the key press to the end of its reply.

async function ask(message, sdk) {
  addTurn("mine").append(element("p", "", message));
  const turn = addTurn("reply");
  const stopWaiting = showWaiting(turn);
  leaving = new AbortController();
  setBusy(true);
  try {
    const response = await fetch(form.dataset.url, {
      method: "POST",
      headers: {
        "Content-Type": "application/json",
        "X-CSRFToken": form.elements.csrfmiddlewaretoken.value,
      },
      body: JSON.stringify({ message, sdk }),
      signal: leaving.signal,
    });
    stopWaiting();
    if (response.ok) await showReply(turn, response);
    else await showRefusal(turn, response, () => ask(message, sdk));
  } catch (error) {
    stopWaiting();
    const text = error.name === "AbortError" ? "Stopped." : "The connection broke off.";
    turn.append(element("p", "broken", text));
  } finally {
    leaving = null;
    setBusy(false);
    scrollDown();
  }
}

function showWaiting(turn) {
  const line = turn.appendChild(element("p", "waiting", "Waiting for a slot …"));
  const started = Date.now();
  const timer = setInterval(() => {
    line.textContent = `Waiting for a slot … ${Math.round((Date.now() - started) / 1000)} s`;
  }, 1000);
  scrollDown();
  return () => {
    clearInterval(timer);
    line.remove();
  };
}

async function showReply(turn, response) {
  turn.append(facts(response.headers));
  const text = turn.appendChild(element("p", ""));
  let isOver = false;
  for await (const event of events(response.body)) {
    if (event.type === "token") text.textContent += event.text;
    else if (event.type === "error") turn.append(element("p", "broken", event.detail));
    isOver ||= event.type === "done" || event.type === "error";
    scrollDown();
  }
  if (!isOver) turn.append(element("p", "broken", "The reply broke off."));
}

function facts(headers) {
  const line = element("p", "facts");
  const waited = Number(headers.get("X-LLM-Throttle-Waited-Ms")) / 1000;
  line.append(element("span", "", `Tier ${headers.get("X-LLM-Throttle-Tier")}`));
  line.append(element("span", "", `waited ${waited.toFixed(1)} s`));
  const ticket = line.appendChild(element("span", "", "ticket "));
  ticket.append(element("code", "", headers.get("X-LLM-Throttle-Ticket") ?? "–"));
  return line;
}

async function showRefusal(turn, response, again) {
  const problem = await response.json().catch(() => ({}));
  const text = REASONS[problem.reason] ?? problem.detail ?? `The server answered ${response.status}.`;
  const box = turn.appendChild(element("div", "refused"));
  const line = box.appendChild(element("p", ""));
  line.append(element("strong", "", "Not this time. "), text);
  const seconds = Number(response.headers.get("Retry-After"));
  if (seconds > 0) box.append(retryButton(seconds, again));
}

function retryButton(seconds, again) {
  const button = element("button", "");
  button.type = "button";
  const readyAt = Date.now() + seconds * 1000;
  const tick = () => {
    const left = Math.ceil((readyAt - Date.now()) / 1000);
    button.disabled = left > 0;
    button.textContent = left > 0 ? `Try again in ${left} s` : "Try again";
    if (left <= 0) clearInterval(timer);
  };
  const timer = setInterval(tick, 250);
  tick();
  button.addEventListener("click", () => {
    if (leaving !== null) return;
    button.remove();
    again();
  });
  return button;
}

// Server-sent events out of a fetch: EventSource can neither POST nor read a refusal's status.

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let unread = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    unread += value;
    const blocks = unread.split("\n\n");
    unread = blocks.pop();
    for (const block of blocks) {
      const data = block.split("\n").filter((line) => line.startsWith("data:"));
      if (data.length) yield JSON.parse(data.map((line) => line.slice(5)).join("\n"));
    }
  }
}

function setBusy(isBusy) {
  sendButton.hidden = isBusy;
  stopButton.hidden = !isBusy;
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  const message = field.value.trim();
  if (!message || leaving !== null) return;
  field.value = "";
  ask(message, form.elements.sdk.value);
});

field.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    form.requestSubmit();
  }
});

stopButton.addEventListener("click", () => leaving?.abort());
field.focus();
