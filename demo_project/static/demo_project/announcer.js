// Tells screen readers what happened, without talking all the time.

const PAUSE = 6_000;

export class Announcer {
  #node = document.getElementById("status");
  #toldAt = 0;

  /** What somebody wants to know at once. */
  tell(text) {
    this.#node.textContent = text;
    this.#toldAt = Date.now();
  }

  /** What is worth telling now and then: positions change faster than one can listen. */
  mention(text) {
    if (Date.now() - this.#toldAt > PAUSE && this.#node.textContent !== text) this.tell(text);
  }
}
