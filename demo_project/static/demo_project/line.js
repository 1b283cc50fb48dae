// The wait of one message: where it stands, how long it may take, a bar that moves.

import { fromTemplate, show, slot } from "./parts.js";
import { expectation, standing } from "./words.js";

const TICK = 250;
// The bar is full only when the wait is over, which no estimate knows.
const ALMOST = 0.96;

export class Line {
  #position = null;
  #heardAt = 0;
  #progress = 0;
  #note = "";
  #timer;

  /**
   * @param {{budget: number, tier: string, askedAt: number}} asked
   *   The budget in seconds, 0 where unknown; the instant in milliseconds.
   */
  constructor({ budget, tier, askedAt }) {
    this.askedAt = askedAt;
    this.budget = budget;
    this.tier = tier;
    this.node = fromTemplate("line-template");
    this.#timer = setInterval(() => this.#tick(), TICK);
  }

  get hasWaited() {
    return this.#position !== null;
  }

  tellPosition(position) {
    this.#note = "";
    this.#position = position;
    this.#heardAt = Date.now();
    if (position.cause) this.#progress = 0;
    this.node.classList.remove("lost");
    this.node.classList.add("known");
    this.#tick();
  }

  tellLost({ attempt }) {
    const tries = attempt > 1 ? ` (try ${attempt})` : "";
    this.#note = `Coming back to your place${tries} …`;
    this.node.classList.add("lost");
    this.#tick();
  }

  tellStalled() {
    if (this.#position) return;
    this.#note =
      "No answer yet. Browsers open six connections to one address: close other tabs of this " +
      "chat, or choose WebSocket in the options.";
    this.#tick();
  }

  remove() {
    clearInterval(this.#timer);
    this.node.remove();
  }

  #tick() {
    const now = Date.now();
    const since = (now - this.#heardAt) / 1000;
    const isKnown = this.#position !== null && !this.node.classList.contains("lost");
    show(slot(this.node, "standing"), this.#standing());
    show(slot(this.node, "eta"), isKnown ? expectation(this.#position.eta, since) : "");
    show(slot(this.node, "note"), this.#note || this.#waited(now));
    if (isKnown) this.#moveBar(now, since);
  }

  #standing() {
    if (this.node.classList.contains("lost")) return "Connection lost";
    return this.#position ? standing(this.#position.position, this.tier) : "Connecting …";
  }

  #waited(now) {
    const waited = Math.round((now - this.askedAt) / 1000);
    if (!this.#position) return waited > 1 ? `${waited} s` : "";
    return `Waited ${waited} s` + (this.budget ? ` of at most ${this.budget} s` : "");
  }

  /** How much of the expected wait is over. It never goes back without a cause. */
  #moveBar(now, since) {
    const eta = this.#position.eta ?? [0, 0];
    const left = Math.max(0.5, (eta[0] + eta[1]) / 2 - since);
    const over = (now - this.askedAt) / 1000;
    this.#progress = Math.max(this.#progress, Math.min(ALMOST, over / (over + left)));
    this.node.querySelector(".fill").style.transform = `scaleX(${this.#progress.toFixed(3)})`;
  }
}
