/**
 * When to give a connection up, and when to come back.
 *
 * @module
 */

import { ConnectionLost } from "./transports.js";

const STALLED_AFTER = 5_000;

// A stream of events brings a keep-alive every 15 s; when three are missing it is dead.
const SILENT_AFTER = 50_000;

const BACKOFF_FIRST = 500;
// Several tries fit into the 15 s for which the server keeps a place.
const BACKOFF_LAST = 4_000;

// A share of Retry-After: clients that were sent away together shall not come back together.
const RETRY_JITTER = 0.25;
const RETRY_UNKNOWN = 5;

/** Listens to one connection: tells when nothing comes, ends it when it has gone silent. */
export class Watch {
  #timer;
  #attempt;

  /**
   * @param {AbortController} attempt
   * @param {(() => void) | undefined} onStalled
   */
  constructor(attempt, onStalled) {
    this.#attempt = attempt;
    this.#timer = setTimeout(() => onStalled?.(), STALLED_AFTER);
  }

  /** @param {boolean} hasKeepAlive  Whether silence means anything. */
  heard(hasKeepAlive) {
    this.stop();
    if (hasKeepAlive) this.#timer = setTimeout(() => this.#giveUp(), SILENT_AFTER);
  }

  stop() {
    clearTimeout(this.#timer);
  }

  #giveUp() {
    this.#attempt.abort(new ConnectionLost("The server has gone silent."));
  }
}

/**
 * Milliseconds before the next try to reconnect; half of it is chance.
 *
 * @param {number} losses  How many there have been before this one.
 */
export function backoff(losses) {
  const longest = Math.min(BACKOFF_LAST, BACKOFF_FIRST * 2 ** losses);
  return (longest / 2) * (1 + Math.random());
}

/**
 * Seconds before a refused chat may be tried again: never less than the server said, never 0.
 *
 * @param {number | null | undefined} seconds  What the server said.
 */
export function retryDelay(seconds) {
  const least = Math.max(1, Number.isFinite(seconds) ? Number(seconds) : RETRY_UNKNOWN);
  return least * (1 + RETRY_JITTER * Math.random());
}

/**
 * Sleep, or until the signal is aborted.
 *
 * @param {number} milliseconds
 * @param {AbortSignal} signal
 */
export function sleep(milliseconds, signal) {
  return new Promise((resolve) => {
    const timer = setTimeout(wake, milliseconds);
    signal.addEventListener("abort", wake);
    if (signal.aborted) wake();

    function wake() {
      clearTimeout(timer);
      signal.removeEventListener("abort", wake);
      resolve(undefined);
    }
  });
}
