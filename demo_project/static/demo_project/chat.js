// The chat page: a message goes through throttledChat, what comes back goes to its turn.

import { interruptedChat, throttledChat } from "../llm_throttle/client.js";
import { Announcer } from "./announcer.js";
import { Conversations } from "./conversations.js";
import { Turn } from "./turn.js";
import { expectation, standing } from "./words.js";

const RETRIES = 5;

const form = document.getElementById("ask");
const field = document.getElementById("message");
const sendButton = document.getElementById("send");
const cancelButton = document.getElementById("cancel");
const newButton = document.getElementById("new");
const pageTitle = document.title;

const announcer = new Announcer();
const conversations = new Conversations(form.dataset.user, showState);

// Asking

function ask(message) {
  const { transport, sdk, again } = form.elements;
  const record = {
    message,
    sdk: sdk.value,
    transport: transport.value,
    retries: again.checked ? RETRIES : 0,
  };
  const conversation = conversations.current;
  conversation.records.push(record);
  return run(conversation, addTurn(conversation, record));
}

function addTurn(conversation, record) {
  const turn = new Turn(conversation.talk, record, {
    again: () => conversation.isBusy || run(conversation, turn),
    budget: Number(form.dataset.wait),
    tier: form.dataset.tier,
  });
  return turn;
}

async function run(conversation, turn, isBack = false) {
  const { message, sdk, transport, retries } = turn.record;
  conversation.leaving = new AbortController();
  turn.begin(isBack);
  conversation.talk.scrollTop = conversation.talk.scrollHeight;
  saveAndShow();
  const outcome = await throttledChat({
    url: form.dataset[transport],
    transport,
    body: { message, sdk },
    headers: { "X-CSRFToken": form.elements.csrfmiddlewaretoken.value },
    key: conversation.key,
    signal: conversation.leaving.signal,
    retries,
    ...listeners(conversation, turn),
  });
  conversation.leaving = conversation.position = null;
  turn.end(outcome);
  saveAndShow();
  announcer.tell(turn.summary());
}

function listeners(conversation, turn) {
  return {
    onPosition(position) {
      if (turn.record.refusal) turn.begin();
      conversation.position = position.position;
      turn.tellPosition(position);
      const place = standing(position.position, form.dataset.tier);
      announcer.mention(`${place}, ${expectation(position.eta)}.`);
      saveAndShow();
    },
    onGranted(grant) {
      turn.tellGranted(grant);
      announcer.tell("It is your turn.");
      saveAndShow();
    },
    onToken(text) {
      turn.tellToken(text);
    },
    onRefused(refusal) {
      turn.tellRefused(refusal);
      saveAndShow();
    },
    onLost(loss) {
      turn.tellLost(loss);
      announcer.tell("Connection lost. Coming back to your place.");
    },
    onStalled() {
      turn.tellStalled();
    },
  };
}

// What the page around the conversation shows

function saveAndShow() {
  conversations.save();
  showState();
}

function showState() {
  const { current } = conversations;
  if (!current) return;
  sendButton.disabled = current.isBusy;
  cancelButton.hidden = !current.isBusy;
  cancelButton.textContent = current.last?.state === "streaming" ? "Stop" : "Cancel";
  newButton.hidden = current.records.length === 0;
  const waiting = current.isBusy && current.position !== null;
  document.title = waiting ? `${standing(current.position)} · ${pageTitle}` : pageTitle;
}

// What the person does

form.addEventListener("submit", (event) => {
  event.preventDefault();
  const message = field.value.trim();
  if (!message || conversations.current.isBusy) return;
  field.value = "";
  ask(message);
});

field.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    form.requestSubmit();
  }
});

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") cancel();
});

cancelButton.addEventListener("click", cancel);

function cancel() {
  conversations.current.leaving?.abort();
  field.focus();
}

newButton.addEventListener("click", () => {
  conversations.startNew();
  field.focus();
});

// Over a reload

addEventListener("pagehide", () => conversations.save());

function restore() {
  conversations.restore();
  for (const conversation of conversations.all) {
    for (const record of conversation.records) restoreTurn(conversation, record);
    conversation.talk.scrollTop = conversation.talk.scrollHeight;
  }
  saveAndShow();
}

function restoreTurn(conversation, record) {
  const turn = addTurn(conversation, record);
  if (record.state !== "waiting") turn.restore();
  else if (interruptedChat(conversation.key)) run(conversation, turn, true);
  else turn.end({ type: "error", kind: "gone" });
}

restore();
if (window === window.top) field.focus();
