// What the page says, in one place.

export function ordinal(number) {
  const teens = number % 100 >= 11 && number % 100 <= 13;
  const ending = teens ? "th" : ({ 1: "st", 2: "nd", 3: "rd" }[number % 10] ?? "th");
  return `${number}${ending}`;
}

/** Each tier has a line of its own; which line is served when is the scheduler's business. */
export function standing(position, tier = "") {
  const place = position === 1 ? "next" : ordinal(position);
  return `You are ${place} in ${tier ? `the ${tier} line` : "line"}`;
}

/** An honest range, `since` seconds after the server gave it; one that is over says so. */
export function expectation(eta, since = 0) {
  if (!eta) return "no estimate yet";
  const [low, high] = eta.map((seconds) => seconds - since);
  if (high < 0) return high < -1 ? "longer than expected" : "any moment now";
  const [from, to] = [Math.max(0, Math.round(low)), Math.max(1, Math.round(high))];
  if (to > 90) return `about ${Math.max(1, Math.round(from / 60))}–${Math.ceil(to / 60)} min`;
  if (from >= to) return `about ${to} s`;
  return from === 0 ? `up to ${to} s` : `about ${from}–${to} s`;
}

const REASONS = {
  user_depth: "You have as many messages waiting and running as your tier allows.",
  tier_full: "The line of your tier is full.",
  queue_full: "The line is full.",
  wait_too_long: "The wait would be longer than your tier allows.",
  wait_expired: "No slot came free in the time that your tier may wait.",
  paused: "The operator has paused this service.",
  unserviceable: "Nobody of your tier is let in at present.",
  recovering: "The service is recovering and lets nobody in for a few seconds.",
  backend_down: "The waiting room is out of order.",
  shutting_down: "This server is being stopped.",
};

export function reason(refusal) {
  return REASONS[refusal.reason] ?? refusal.detail ?? "The server said no.";
}

const FAILURES = {
  lost: "The server cannot be reached.",
  broken: "The reply broke off: the connection was lost.",
  gone: "The page was closed for too long while this message waited.",
  moved: "This message goes on in another tab.",
  foreign_ticket: "This place in line belongs to somebody else.",
  lease_lost: "The reply was ended: its slot was taken back.",
};

export function failure(outcome) {
  return FAILURES[outcome.kind] ?? outcome.detail;
}

export const CANCELLED = "Cancelled.";

/** For the list of conversations. */
export function inBrief(state, position) {
  if (state === "waiting") return position ? (position === 1 ? "next" : ordinal(position)) : "…";
  return { streaming: "replying", refused: "refused", error: "failed" }[state] ?? "";
}

export function waited(milliseconds) {
  const seconds = milliseconds / 1000;
  if (seconds < 0.1) return "did not wait";
  return `waited ${seconds < 10 ? seconds.toFixed(1) : Math.round(seconds)} s`;
}
