// What is worth jumping to in a recording: preemptions, ends, changes of policies, gaps, bookmarks. Drawn as a strip over the slider.

import { formatCount } from "./format.js";
import { css } from "./palette.js";
import { shortId } from "./replay_follow.js";

const KINDS = {
  preempt: { words: "preempted", color: "warn", height: 0.75 },
  finish: { words: "finished", color: "muted", height: 0.4 },
  abort: { words: "aborted", color: "bad", height: 0.75 },
  reject: { words: "refused", color: "bad", height: 0.6 },
  reset: { words: "the engine was reset", color: "bad", height: 1 },
  policies: { words: "policies changed", color: "accent", height: 0.75 },
  gap: { words: "steps that were not recorded", color: "bad", height: 1 },
  bookmark: { words: "bookmark", color: "accent", height: 1 },
};
const OTHER = { words: "", color: "muted", height: 0.4 };
const MAX_WORDS = 3;
const REACH_CSS = 6;

/** First marker after `step` (direction 1) or last before it (-1), of one kind or any; markers are in order of steps. */
export function findMarker(markers, step, direction, kind = "") {
  const fits = (marker) => (kind === "" || marker.kind === kind) && Math.sign(marker.step - step) === direction;
  return direction > 0 ? markers.find(fits) : markers.findLast(fits);
}

/** What happened at a step, in words; empty when nothing did. */
export function describeMarkers(markers, step) {
  return wordMarkers(markers, step)
    .map(({ requestId, words }) => (requestId ? `${shortId(requestId)} ${words}` : words))
    .join(", ");
}

/** The same in pieces: the request it is about, if any, and what happened. */
export function wordMarkers(markers, step) {
  const here = markers.filter((marker) => marker.step === step);
  const words = here.slice(0, MAX_WORDS).map(wordMarker);
  if (here.length > MAX_WORDS) words.push({ requestId: null, words: `${here.length - MAX_WORDS} more` });
  return words;
}

function wordMarker({ kind, request_id: requestId, note }) {
  const words = kind === "preempt" && note === "swap" ? "preempted, swapped out" : KINDS[kind]?.words || kind;
  const isTold = (kind === "bookmark" || kind === "policies") && note;
  return isTold ? { requestId: null, words: `${words}: ${note}` } : { requestId, words };
}

/** Of markers within `reach` pixels of `x` the nearest, of equally near ones the tallest; `at(step)` is where one lies. */
export function markerAt(markers, x, at, reach) {
  const rank = ({ step, kind }) => Math.abs(at(step) - x) - (KINDS[kind] ?? OTHER).height / 2;
  const near = markers.filter(({ step }) => Math.abs(at(step) - x) <= reach);
  return near.reduce((best, marker) => (best === null || rank(marker) < rank(best) ? marker : best), null);
}

/**
 * Draws markers between the first and the last step, says in `tip` what the one under the pointer is, and calls
 * `onpick(step)` on a click; `inset` is half the width of the slider's thumb, in CSS pixels.
 */
export class MarkerStrip {
  constructor(canvas, tip, { inset, onpick }) {
    this.canvas = canvas;
    this.tip = tip;
    this.inset = inset;
    canvas.addEventListener("pointermove", (event) => this.#hover(event.offsetX));
    canvas.addEventListener("pointerleave", () => this.#hover(-Infinity));
    canvas.addEventListener("click", (event) => {
      const marker = this.#at(event.offsetX);
      if (marker) onpick(marker.step);
    });
    this.ctx = canvas.getContext("2d");
    this.theme = null;
    new ResizeObserver(() => this.paint()).observe(canvas);
    this.markers = [];
    this.range = { firstStep: 1, lastStep: 1, gaps: [] };
  }

  /** Where a step lies, in CSS pixels. */
  #x(step) {
    const { range, inset, canvas } = this;
    const span = Math.max(1, range.lastStep - range.firstStep);
    return inset + ((canvas.clientWidth - 2 * inset) * (step - range.firstStep)) / span;
  }

  #at(x) {
    return markerAt(this.markers, x, (step) => this.#x(step), REACH_CSS);
  }

  #hover(x) {
    const marker = this.#at(x);
    this.canvas.classList.toggle("has-marker", marker !== null);
    this.tip.hidden = marker === null;
    if (marker === null) return;
    this.tip.textContent = `Step ${formatCount(marker.step)}: ${describeMarkers(this.markers, marker.step)}`;
    const left = Math.max(0, Math.min(this.#x(marker.step), this.canvas.clientWidth - this.tip.offsetWidth));
    this.tip.style.transform = `translateX(${left}px)`;
  }

  paint() {
    const { canvas, ctx, theme, range } = this;
    const ratio = devicePixelRatio || 1;
    const width = Math.max(1, Math.round(canvas.clientWidth * ratio));
    const height = Math.max(1, Math.round(canvas.clientHeight * ratio));
    Object.assign(canvas, { width, height }); // clears it
    if (!theme) return;
    const x = (step) => Math.round(this.#x(step) * ratio);
    ctx.fillStyle = css(theme.bad, 0.35);
    for (const { first_step: first, num_steps: count } of range.gaps) ctx.fillRect(x(first), 0, Math.max(ratio, x(first + count) - x(first)), height);
    // Low ones first, so that a bookmark is never hidden by a hundred ends.
    const marks = this.markers.map(({ step, kind }) => ({ at: x(step), look: KINDS[kind] ?? OTHER }));
    marks.sort((a, b) => a.look.height - b.look.height);
    for (const { at, look } of marks) {
      ctx.fillStyle = css(theme[look.color]);
      ctx.fillRect(at - Math.floor(ratio / 2), Math.round(height * (1 - look.height)), Math.max(1, Math.round(1.5 * ratio)), height);
    }
  }
}
