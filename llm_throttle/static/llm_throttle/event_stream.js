/**
 * Server-sent events out of a fetch, read as the HTML standard says.
 *
 * EventSource itself can neither POST nor tell why it was refused.
 *
 * @module
 */

/**
 * @typedef {object} StreamEvent
 * @property {string} event  The event's name, "message" where the server gave none, "" for a comment.
 * @property {string} data   Its data lines, or the comment's text.
 */

/**
 * Yield the events of a response's body, comments included: they show that the server is there.
 *
 * @param {ReadableStream<Uint8Array>} body
 * @returns {AsyncGenerator<StreamEvent, void, void>}
 */
export async function* readEvents(body) {
  const parser = new EventStreamParser();
  for await (const text of readText(body)) yield* parser.feed(text);
}

/**
 * Yield a body's text as it comes; leaving the loop closes the connection.
 *
 * @param {ReadableStream<Uint8Array>} body
 * @returns {AsyncGenerator<string, void, void>}
 */
export async function* readText(body) {
  const reader = body.getReader(); // Safari cannot iterate over a body
  const decoder = new TextDecoder(); // drops a byte order mark, joins characters cut in two
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      yield decoder.decode(value, { stream: true });
    }
  } finally {
    reader.cancel().catch(() => {}); // it has ended, or broke off with the same error as above
  }
}

/** Puts lines and events together from pieces that may end anywhere. */
export class EventStreamParser {
  #line = "";
  #isAfterReturn = false;
  #event = "";
  /** @type {string[]} */
  #data = [];

  /**
   * @param {string} text
   * @returns {StreamEvent[]} What the text completed.
   */
  feed(text) {
    const found = [];
    for (const line of this.#splitLines(text)) {
      const event = this.#readLine(line);
      if (event) found.push(event);
    }
    return found;
  }

  /** Lines end with LF, CR or CRLF; a CR counts at once, as its LF may be long in coming. */
  #splitLines(text) {
    if (this.#isAfterReturn && text.startsWith("\n")) text = text.slice(1);
    else if (text === "") return [];
    this.#isAfterReturn = text.endsWith("\r");
    const lines = (this.#line + text).split(/\r\n|\r|\n/);
    this.#line = lines.pop() ?? "";
    return lines;
  }

  #readLine(line) {
    if (line === "") return this.#endEvent();
    if (line.startsWith(":")) return { event: "", data: line.slice(1).trim() };
    const [, field, value] = /^([^:]*)(?:: ?(.*))?$/s.exec(line) ?? [];
    if (field === "data") this.#data.push(value ?? "");
    if (field === "event") this.#event = value ?? "";
    return null;
  }

  #endEvent() {
    const event = { event: this.#event || "message", data: this.#data.join("\n") };
    const isEmpty = this.#data.length === 0;
    this.#event = "";
    this.#data = [];
    return isEmpty ? null : event;
  }
}
