// A refusal: why, and a countdown to when it makes sense to come back.

import { fromTemplate, show, slot } from "./parts.js";
import { reason } from "./words.js";

const TICK = 250;

export class RefusalBox {
  #timer;

  /** @param {() => void} again  What the button does; it waits for the countdown. */
  constructor(refusal, again) {
    this.refusal = refusal;
    this.node = fromTemplate("refusal-template");
    this.button = this.node.querySelector("button");
    slot(this.node, "reason").textContent = reason(refusal);
    slot(this.node, "code").textContent = `${refusal.status ?? 503} ${refusal.reason}`;
    this.button.hidden = refusal.willRetry;
    this.button.addEventListener("click", again);
    this.#timer = setInterval(() => this.#tick(), TICK);
    this.#tick();
  }

  remove() {
    clearInterval(this.#timer);
    this.node.remove();
  }

  #tick() {
    const left = Math.max(0, Math.ceil((this.refusal.retryAt - Date.now()) / 1000));
    this.button.disabled = left > 0;
    show(this.button, left > 0 ? `Try again in ${left} s` : "Try again");
    const countdown = this.refusal.willRetry ? `Tried again by itself in ${left} s` : "";
    show(slot(this.node, "countdown"), countdown);
    if (left === 0) clearInterval(this.#timer);
  }
}
