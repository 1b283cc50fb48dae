/**
 * A tab's places in line: what a reload needs to come back to them.
 *
 * @module
 */

/**
 * @typedef {object} Place
 * @property {string} ticket
 * @property {string} url
 * @property {Record<string, unknown>} body
 * @property {number} seenAt  When the server last spoke of it, in milliseconds since 1970.
 */

const PREFIX = "llm-throttle:";

// A browser brings a closed tab's storage back days later; nobody is waiting for that answer.
const FORGOTTEN_AFTER = 120_000;

/**
 * @param {string} key
 * @param {Omit<Place, "seenAt">} place
 */
export function keepPlace(key, place) {
  access((storage) =>
    storage.setItem(PREFIX + key, JSON.stringify({ ...place, seenAt: Date.now() })),
  );
}

/** @param {string} key */
export function forgetPlace(key) {
  access((storage) => storage.removeItem(PREFIX + key));
}

/**
 * @param {string} key
 * @returns {Place | null}
 */
export function placeOf(key) {
  const place = access((storage) => JSON.parse(storage.getItem(PREFIX + key) ?? "null"));
  return place && Date.now() - place.seenAt < FORGOTTEN_AFTER ? place : null;
}

/** Storage may be forbidden or full; then a reload starts again at the end of the line. */
function access(use) {
  try {
    return use(sessionStorage);
  } catch {
    return null;
  }
}
