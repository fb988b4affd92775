// The polite live region. It speaks at most once a second, and of what happens to requests at most every ten seconds.

import { MARK } from "./wire.js";

const PAUSE_MS = 1000;
const NEWS_PAUSE_MS = 10_000;
const NEWS = [
  [MARK.PREEMPT, "preempted"],
  [MARK.ABORT, "aborted"],
  [MARK.FINISH, "finished"],
];

/** Says the newest text; what is overtaken before it could be said is dropped. */
export class Announcer {
  #timer = 0;
  #pending = "";
  #saidAt = -Infinity;
  #newsAt = -Infinity;
  #news = new Map();

  constructor(region) {
    this.region = region;
  }

  say(text) {
    this.#pending = text;
    if (this.#timer) return;
    const wait = Math.max(0, this.#saidAt + PAUSE_MS - performance.now());
    this.#timer = setTimeout(() => this.#flush(), wait);
  }

  #flush() {
    this.#timer = 0;
    this.#saidAt = performance.now();
    this.region.textContent = this.#pending;
  }

  /** Count what happened to requests; it is summed up later. */
  count(marks) {
    for (const { kind, live } of marks) if (live) this.#news.set(kind, (this.#news.get(kind) ?? 0) + 1);
  }

  /** Call now and then: sums up the news. */
  tellNews(now) {
    const parts = NEWS.filter(([kind]) => this.#news.has(kind)).map(([kind, word]) => `${this.#news.get(kind)} ${word}`);
    if (parts.length === 0 || now - this.#newsAt < NEWS_PAUSE_MS) return;
    this.#newsAt = now;
    this.#news.clear();
    this.say(`Requests: ${parts.join(", ")}.`);
  }
}
