// One message and what came of it. The record is all that a reload needs.

import { Line } from "./line.js";
import { make } from "./parts.js";
import { RefusalBox } from "./refusal.js";
import { CANCELLED, failure, reason, waited } from "./words.js";

export class Turn {
  #line = null;
  #refusal = null;
  #text = null;

  /**
   * @param {HTMLElement} talk  Where it is shown.
   * @param {object} record     message, sdk, transport, and later: state, text, tier, waitedMs, …
   * @param {{again: () => void, budget: number, tier: string}} options
   */
  constructor(talk, record, options) {
    this.record = record;
    this.options = options;
    this.talk = talk;
    talk.querySelector(".empty")?.remove();
    talk.append(make("div", "turn mine"));
    talk.lastElementChild.append(make("p", "", record.message));
    this.node = talk.appendChild(make("div", "turn reply"));
  }

  /** Show a turn of before the reload that waits no longer. */
  restore() {
    const { state, text } = this.record;
    if (this.record.tier) this.#showFacts();
    if (text) this.#showText(text);
    if (state === "streaming") this.end({ type: "error", kind: "broken" });
    if (state === "refused") this.tellRefused({ ...this.record.refusal, willRetry: false });
    if (state === "error" || state === "cancelled") this.#showEnd();
  }

  // While it lasts

  /** @param {boolean} isBack  Whether it was waiting before: its time goes on. */
  begin(isBack = false) {
    this.#takeAway();
    Object.assign(this.record, { state: "waiting", refusal: undefined, end: undefined });
    if (!isBack) this.record.askedAt = Date.now();
    this.node.replaceChildren();
    this.#line = new Line({ ...this.options, askedAt: this.record.askedAt });
    this.node.append(this.#line.node);
    this.#follow();
  }

  tellPosition(position) {
    this.#line?.tellPosition(position);
  }

  tellLost(loss) {
    this.#line?.tellLost(loss);
  }

  tellStalled() {
    this.#line?.tellStalled();
  }

  tellGranted({ tier, waitedMs, ticket }) {
    const sinceAsked = Date.now() - this.record.askedAt;
    // The server counts from the last connection, a person from the question.
    const waited = this.#line?.hasWaited ? sinceAsked : waitedMs;
    this.#takeAway();
    Object.assign(this.record, { state: "streaming", tier, waitedMs: waited, ticket, text: "" });
    this.#showFacts();
    this.#showText("");
    this.node.classList.add("streaming");
    this.#follow();
  }

  tellToken(text) {
    this.record.text += text;
    this.#text.append(text);
    this.#follow();
  }

  tellRefused(refusal) {
    this.#takeAway();
    Object.assign(this.record, { state: refusal.willRetry ? "waiting" : "refused", refusal });
    this.#refusal = new RefusalBox(refusal, this.options.again);
    this.node.append(this.#refusal.node);
    this.#follow();
  }

  // The end

  end(outcome) {
    if (outcome.type === "refused") return;
    this.#takeAway();
    this.node.classList.remove("streaming");
    this.record.state = outcome.type;
    this.record.end = outcome.type === "cancelled" ? CANCELLED : failure(outcome);
    if (outcome.type !== "done") this.#showEnd();
    this.#follow();
  }

  /** What a screen reader is told of the end. */
  summary() {
    const { state, text, end, refusal } = this.record;
    if (state === "done") return `Reply: ${text}`;
    if (state === "refused") return `Refused. ${reason(refusal)}`;
    return end ?? "";
  }

  #takeAway() {
    this.#line?.remove();
    this.#refusal?.remove();
    this.#line = this.#refusal = null;
  }

  #showFacts() {
    const { tier, waitedMs, ticket } = this.record;
    const facts = this.node.appendChild(make("p", "facts"));
    if (tier) facts.append(make("span", "tier", tier));
    if (waitedMs !== null) facts.append(make("span", "", waited(waitedMs)));
    const code = make("code", "", ticket.slice(0, 8));
    code.title = ticket;
    facts.append(make("span", "", "ticket "));
    facts.lastElementChild.append(code);
  }

  #showText(text) {
    this.#text = this.node.appendChild(make("p", "text", text));
  }

  #showEnd() {
    const kind = this.record.state === "cancelled" ? "cancelled" : "problem";
    const line = this.node.appendChild(make("p", `end ${kind}`, this.record.end));
    const button = line.appendChild(make("button", "quiet", "Send again"));
    button.type = "button";
    button.addEventListener("click", this.options.again);
  }

  /** Keep the end in sight, unless somebody has scrolled up to read. */
  #follow() {
    const { talk } = this;
    const isNear = talk.scrollHeight - talk.scrollTop - talk.clientHeight < 160;
    if (isNear) talk.scrollTop = talk.scrollHeight;
  }
}
