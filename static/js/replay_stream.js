// The source of a page that shows a recorded session: the same messages as the socket's, in any order of steps and at any
// pace. No DOM: runs in node too.

import { CHUNK_STEPS, ChunkStore, chunkStart } from "./replay_chunks.js";
import { retryDelayMs } from "./stream.js";
import { WireError, decodeMessage } from "./wire.js";

const EARLIER_CHUNKS = 3; // whose rows fill the timeline
const MAX_FORWARD = 2 * CHUNK_STEPS; // steps forward that are played through rather than begun anew
const MAX_LISTED = 64; // messages after which all blocks count as changed
const MAX_A_FRAME = 256;
const MAX_FRAME_MS = 250; // a page that slept goes on where it was
const IDLE_MS = 1000; // longer silence of the engine is shortened to this
const STEADY_MS = 100;

/** Ways to play: as the engine ran, or ten steps a second; both times the speed. */
export const PACES = Object.freeze(["engine", "steady"]);

/**
 * Usage: `new ReplayStream(view, { session, range, onchange, onstatus, onplay })`, `start()`, then `seek`, `play` …
 *
 * - `range`: {firstStep, lastStep, isRunning, gaps: [{first_step, num_steps}]}, renewed with `setRange`
 * - `onchange`, `onstatus`: as those of `EngineStream`
 * - `onplay(playing)`
 *
 * The view is always exactly at one recorded step. Of several seeks in a row the newest counts.
 */
export class ReplayStream {
  #view;
  #options;
  #env;
  #chunks;
  #goal = null;
  #isBusy = false;
  #timer = null;
  #lastTick = null;
  #elapsed = 0;
  #missed = { step: -1, range: null };

  /**
   * @param {import("./reducer.js").EngineView} view
   * @param {{session: string, range: object, step?: number, onchange?: Function, onstatus?: Function,
   *   onplay?: Function, env?: object}} options `step`: where to begin; env: stand-ins for the browser's globals
   */
  constructor(view, { session, range, step = range.lastStep, onchange = () => {}, onstatus = () => {}, onplay = () => {}, env = globalThis }) {
    this.#view = view;
    this.#options = { onchange, onstatus, onplay };
    this.#env = env;
    this.#chunks = new ChunkStore(session, { fetch: (...request) => env.fetch(...request) });
    this.session = session;
    this.range = range;
    this.wanted = step;
    this.playing = false;
    this.pace = PACES[0];
    this.speed = 1;
    this.status = { connected: false, attempt: 0, since: Date.now(), retryAt: null, refused: false, reason: "" };
  }

  /** Show the first picture. Of a session without steps that is the engine before its first one. */
  start() {
    this.seek(this.wanted);
  }

  get hidden() {
    return this.#env.document.visibilityState === "hidden";
  }

  /** Nobody waits for acknowledgements here. */
  painted() {}

  /** Whether it is on its way to a step, or still fills the timeline before it. */
  get isBusy() {
    return this.#isBusy;
  }

  /** A recording comes at the pace of painting. */
  setFps() {}

  /** A running session has grown, or an old one lost its beginning. */
  setRange(range) {
    this.range = range;
  }

  // ---- where ----

  /**
   * Go to a step. `direction`: where to look if nothing of it is recorded, -1 before it, 1 after it.
   * `dragging`: many such calls come in a row, so fetch only what the picture needs.
   */
  seek(step, { direction = -1, dragging = false } = {}) {
    this.wanted = this.#recorded(step, direction);
    this.#goal = { step: this.wanted, dragging };
    this.#elapsed = 0;
    this.#cancelRetry();
    this.#work();
  }

  /** Go some steps forward (or back, if negative), and stay there. */
  stepBy(count) {
    this.pause();
    this.seek(this.wanted + count, { direction: Math.sign(count) });
  }

  /** The gap that a step lies in, or undefined. The state at its end is known. */
  gapAt(step) {
    return this.range.gaps.find(({ first_step: first, num_steps: count }) => step >= first && step < first + count - 1);
  }

  #recorded(step, direction) {
    const { firstStep, lastStep } = this.range;
    const inside = Math.min(lastStep, Math.max(firstStep - 1, Math.round(step))); // what was before the first is known
    const gap = this.gapAt(inside);
    if (!gap) return inside;
    const end = gap.first_step + gap.num_steps - 1;
    const before = gap.first_step - 1;
    return direction > 0 || before < firstStep ? Math.min(end, lastStep) : before;
  }

  async #work() {
    if (this.#isBusy) return;
    this.#isBusy = true;
    while (this.#goal) {
      const goal = this.#goal;
      this.#goal = null;
      await this.#reach(goal);
    }
    this.#isBusy = false;
  }

  async #reach(goal) {
    try {
      await this.#goTo(goal);
    } catch (error) {
      if (this.#goal) return; // somewhere else is wanted by now
      this.#fail(error, goal);
    }
  }

  async #goTo({ step, dragging }) {
    const chunk = await this.#chunks.get(chunkStart(Math.max(step, this.range.firstStep)), step);
    if (!(await this.#goForward(chunk, step))) await this.#begin(this.#earlier(chunk), step);
    this.#setStatus({ connected: true, attempt: 0, retryAt: null, refused: false, reason: "" });
    if (dragging || this.#goal) return;
    await this.#fillTimeline(chunk, step);
    if (chunk.firstStep + CHUNK_STEPS <= this.range.lastStep) this.#prefetch(chunk.firstStep + CHUNK_STEPS);
  }

  /** Apply what lies between the picture and a later step, which is in `last`; false if that is not how to get there. */
  async #goForward(last, step) {
    const view = this.#view;
    const isAhead = view.session === this.session && view.step >= 0 && step >= view.step && step - view.step <= MAX_FORWARD;
    if (!isAhead) return false;
    const messages = [];
    for (let first = chunkStart(view.step + 1); first < last.firstStep; first += CHUNK_STEPS) {
      if (this.#isLost(first)) return false;
      messages.push(...(await this.#chunks.get(first, first + CHUNK_STEPS - 1)).between(view.step, step));
    }
    messages.push(...last.between(view.step, step));
    if (!follows(messages, view.step)) return false;
    await this.#take(messages, { isSeek: true });
    return true;
  }

  /** Begin anew with the first of these chunks, which follow each other, and go on to a step. */
  async #begin(chunks, step) {
    const messages = [chunks[0].messages[0]];
    for (const chunk of chunks) messages.push(...chunk.between(messages.at(-1).step, step));
    await this.#take(messages, { isSeek: true, isReset: true });
  }

  /** The chunk and those before it that are here already and follow each other. */
  #earlier(chunk) {
    const chunks = [chunk];
    for (let count = 0; count < EARLIER_CHUNKS; count++) {
      const before = this.#chunks.peek(chunks[0].firstStep - CHUNK_STEPS, chunks[0].firstStep - 1);
      if (before?.lastStep !== chunks[0].messages[0].step) break;
      chunks.unshift(before);
    }
    return chunks;
  }

  /** Fetch the chunks before, if the timeline lacks them, and begin again with their rows. */
  async #fillTimeline(chunk, step) {
    const first = Math.max(chunkStart(this.range.firstStep), chunk.firstStep - EARLIER_CHUNKS * CHUNK_STEPS);
    const { steps } = this.#view;
    if (steps.length > 0 && steps.get("step", 0) <= Math.max(first, this.range.firstStep)) return;
    try {
      for (let at = chunk.firstStep - CHUNK_STEPS; at >= first; at -= CHUNK_STEPS) {
        if (!this.gapAt(at + CHUNK_STEPS - 1)) await this.#chunks.get(at, at + CHUNK_STEPS - 1);
        if (this.#goal) return;
      }
    } catch {
      return; // the picture is right without them
    }
    const chunks = this.#earlier(chunk);
    const firstRow = steps.length > 0 ? steps.get("step", 0) : step + 1;
    if (chunks[0].messages[0].step + 1 < firstRow && this.#view.step === step) await this.#begin(chunks, step);
  }

  /** Whether nothing of a chunk can be shown: it lies in a gap that ends behind it. */
  #isLost(firstStep) {
    const gap = this.gapAt(firstStep);
    return gap !== undefined && this.gapAt(firstStep + CHUNK_STEPS - 1) === gap;
  }

  #prefetch(firstStep) {
    if (this.#isLost(firstStep)) return;
    this.#chunks.get(firstStep).catch(() => {}); // whoever needs it will hear of it
  }

  /** Decode all of them first, so that the picture never rests half way. */
  async #take(messages, { isSeek, isReset = false }) {
    const decoded = [];
    for (const { buffer } of messages) decoded.push(await decodeMessage(buffer));
    const view = this.#view;
    if (isReset) view.reset();
    const changes = decoded.map((frames, i) => view.applyFrames(frames, { live: !isSeek || i === decoded.length - 1 }));
    if (!this.#goal) this.wanted = view.step;
    const isListed = changes.length <= MAX_LISTED && changes.every(({ changed }) => changed !== null);
    this.#emit(this.#options.onchange, {
      lastStep: view.step,
      changed: isListed ? Uint32Array.from(changes.flatMap(({ changed }) => [...changed])) : null,
      hello: changes.some(({ hello }) => hello),
    });
  }

  // ---- playing ----

  /** Go on by itself from here; from the beginning if this is the end. */
  play() {
    if (this.playing) return;
    if (!this.range.isRunning && this.wanted >= this.range.lastStep) this.seek(this.range.firstStep, { direction: 1 });
    this.playing = true;
    this.#lastTick = null;
    this.#elapsed = 0;
    this.#requestTick();
    this.#options.onplay(true);
  }

  pause() {
    if (!this.playing) return;
    this.playing = false;
    this.#options.onplay(false);
  }

  #requestTick() {
    this.#env.requestAnimationFrame((now) => this.#tick(now));
  }

  #tick(now) {
    if (!this.playing) return;
    const passed = Math.min(MAX_FRAME_MS, this.#lastTick === null ? 0 : now - this.#lastTick);
    this.#lastTick = now;
    this.#requestTick();
    if (this.#isBusy || this.#timer !== null || this.#view.step < 0) return;
    this.#elapsed += passed * this.speed;
    const due = this.#takeDue();
    if (due.messages.length > 0) this.#advance(due.messages);
    else if (due.isAtEnd && !this.range.isRunning) this.pause();
    else if (due.missing !== null) this.#fetchMissing(due.missing);
  }

  /** Go on with a step that is not here yet, also over a gap. What did not come is asked for again with the next range. */
  #fetchMissing(step) {
    const isTried = this.#missed.step === this.#view.step && this.#missed.range === this.range;
    this.#missed = { step: this.#view.step, range: this.range };
    if (!isTried) this.seek(step, { direction: 1 });
    else if (!this.range.isRunning) this.pause();
  }

  /** The messages whose time has come; `missing`: the step that has to be fetched before anything goes on. */
  #takeDue() {
    const due = { messages: [], missing: null, isAtEnd: false };
    let { step, tMs } = this.#view;
    while (due.messages.length < MAX_A_FRAME) {
      due.isAtEnd = step >= this.range.lastStep;
      if (due.isAtEnd) break;
      const message = this.#messageOf(step + 1);
      if (!message) due.missing = this.#recorded(step + 1, 1);
      const waitMs = message && this.pace === "engine" ? Math.min(IDLE_MS, Math.max(0, message.tMs - tMs)) : STEADY_MS;
      if (!message || this.#elapsed < waitMs) break;
      this.#elapsed -= waitMs;
      due.messages.push(message);
      ({ step, tMs } = message);
    }
    // What cannot be kept up with, or has to be waited for, is not caught up with later.
    if (due.messages.length === MAX_A_FRAME || due.isAtEnd) this.#elapsed = 0;
    if (due.missing === step) due.missing = null;
    return due;
  }

  #messageOf(step) {
    const chunk = this.#chunks.peek(chunkStart(step), step);
    return chunk?.messages.find((message) => message.step === step);
  }

  async #advance(messages) {
    this.#isBusy = true;
    try {
      await this.#take(messages, { isSeek: false });
    } catch (error) {
      this.#fail(error, { step: this.#view.step });
    }
    this.#isBusy = false;
    if (this.#goal) this.#work();
    const next = chunkStart(this.#view.step) + CHUNK_STEPS;
    if (next <= this.range.lastStep && !this.#chunks.peek(next)) this.#prefetch(next);
  }

  // ---- failing ----

  #fail(error, { step }) {
    const isFinal = error.fatal || error instanceof WireError;
    if (isFinal) this.pause();
    const attempt = this.status.attempt + 1;
    const delay = retryDelayMs(attempt);
    if (!isFinal) this.#timer = this.#env.setTimeout(() => this.seek(step), delay);
    this.#setStatus({ connected: false, attempt, retryAt: isFinal ? null : Date.now() + delay, refused: isFinal, reason: error.message });
  }

  #cancelRetry() {
    if (this.#timer !== null) this.#env.clearTimeout(this.#timer);
    this.#timer = null;
  }

  #setStatus(changes) {
    const since = changes.connected === this.status.connected ? this.status.since : Date.now();
    const before = JSON.stringify(this.status);
    this.status = { ...this.status, ...changes, since };
    if (JSON.stringify(this.status) !== before) this.#emit(this.#options.onstatus, this.status);
  }

  /** A listener that throws is reported as any other error and stops nothing here. */
  #emit(listener, detail) {
    queueMicrotask(() => listener(detail));
  }
}

/** Whether each message is of the step after the one before it. */
function follows(messages, step) {
  return messages.every((message, i) => message.step === step + 1 + i);
}
