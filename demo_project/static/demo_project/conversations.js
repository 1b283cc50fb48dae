// The conversations of this tab: kept over a reload, one of them in sight.

import { fromTemplate, make, show } from "./parts.js";
import { inBrief } from "./words.js";

const NOTHING = { all: [], current: null };

export class Conversations {
  /** @type {Conversation[]} */
  all = [];
  current = null;

  /** @param {string} user  Conversations belong to who had them, not to the tab alone. */
  constructor(user, onSelect) {
    this.storageKey = `demo:${user}`;
    this.user = user;
    this.onSelect = onSelect;
    this.list = document.getElementById("conversations");
    this.talks = document.getElementById("talks");
  }

  restore() {
    const { all, current } = this.#kept();
    for (const kept of all) this.add(kept);
    if (all.length === 0) this.add();
    this.select(this.all.find((one) => one.id === current) ?? this.all.at(-1));
  }

  add(kept = { id: crypto.randomUUID?.() ?? String(Math.random()), records: [] }) {
    const conversation = new Conversation(kept, this.user);
    conversation.button.addEventListener("click", () => this.select(conversation));
    this.all.push(conversation);
    this.list.append(conversation.item);
    this.talks.append(conversation.talk);
    return conversation;
  }

  select(conversation) {
    this.current = conversation;
    for (const one of this.all) {
      one.talk.hidden = one !== conversation;
      one.button.setAttribute("aria-current", String(one === conversation));
    }
    conversation.item.scrollIntoView({ block: "nearest", inline: "nearest" });
    conversation.talk.scrollTop = conversation.talk.scrollHeight;
    this.onSelect();
  }

  /** An empty conversation, the one that is there or a new one. */
  startNew() {
    this.select(this.all.find((one) => one.records.length === 0) ?? this.add());
  }

  save() {
    const all = this.all.map(({ id, records }) => ({ id, records }));
    const kept = JSON.stringify({ all, current: this.current.id });
    try {
      sessionStorage.setItem(this.storageKey, kept);
    } catch {
      // full or forbidden: a reload then starts with an empty page
    }
    for (const one of this.all) one.showState();
  }

  #kept() {
    try {
      return JSON.parse(sessionStorage.getItem(this.storageKey)) ?? NOTHING;
    } catch {
      return NOTHING;
    }
  }
}

export class Conversation {
  /** Aborts the chat that runs; null where none does. */
  leaving = null;
  position = null;

  constructor({ id, records }, user) {
    this.id = id;
    this.key = `demo:${user}:${id}`;
    this.records = records;
    this.talk = fromTemplate("talk-template");
    this.item = make("li");
    this.button = this.item.appendChild(make("button", "quiet"));
    this.button.type = "button";
    this.title = this.button.appendChild(make("span", "title"));
    this.state = this.button.appendChild(make("span", "state"));
    this.showState();
  }

  get isBusy() {
    return this.leaving !== null;
  }

  get last() {
    return this.records.at(-1);
  }

  showState() {
    show(this.title, this.records[0]?.message ?? "New conversation");
    show(this.state, inBrief(this.last?.state, this.position));
    this.button.dataset.state = this.last?.state ?? "";
  }
}
