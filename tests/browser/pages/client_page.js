// Runs chats for a test and keeps what each callback was told.

import { interruptedChat, throttledChat } from "/llm_throttle/client.js";
import { EventStreamParser } from "/llm_throttle/event_stream.js";

const heard = [];

function keep(name) {
  return (value) => heard.push({ name, value: value ?? null, at: performance.now() });
}

async function chat(options = {}) {
  const leaving = new AbortController();
  window.cancel = () => leaving.abort();
  const outcome = await throttledChat({
    url: "/chat/",
    message: "Hello",
    signal: leaving.signal,
    onPosition: keep("position"),
    onGranted: keep("granted"),
    onToken: keep("token"),
    onEvent: keep("event"),
    onDone: keep("done"),
    onRefused: keep("refused"),
    onError: keep("error"),
    onLost: keep("lost"),
    onStalled: keep("stalled"),
    ...options,
  });
  keep("outcome")(outcome);
  return outcome;
}

function parse(pieces) {
  const parser = new EventStreamParser();
  return pieces.flatMap((piece) => parser.feed(piece));
}

Object.assign(window, { heard, chat, parse, interruptedChat });
document.documentElement.dataset.ready = "yes";
