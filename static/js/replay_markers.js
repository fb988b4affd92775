// What is worth jumping to in a recording: preemptions, ends, gaps, bookmarks. Drawn as a strip over the slider.

import { css } from "./palette.js";
import { shortId } from "./replay_follow.js";

const KINDS = {
  preempt: { words: "preempted", color: "warn", height: 0.75 },
  finish: { words: "finished", color: "muted", height: 0.4 },
  abort: { words: "aborted", color: "bad", height: 0.75 },
  reject: { words: "refused", color: "bad", height: 0.6 },
  reset: { words: "the engine was reset", color: "bad", height: 1 },
  gap: { words: "steps that were not recorded", color: "bad", height: 1 },
  bookmark: { words: "bookmark", color: "accent", height: 1 },
};
const OTHER = { words: "", color: "muted", height: 0.4 };
const MAX_WORDS = 3;

/** First marker after `step` (direction 1) or last before it (-1), of one kind or any; markers are in order of steps. */
export function findMarker(markers, step, direction, kind = "") {
  const fits = (marker) => (kind === "" || marker.kind === kind) && Math.sign(marker.step - step) === direction;
  return direction > 0 ? markers.find(fits) : markers.findLast(fits);
}

/** What happened at a step, in words; empty when nothing did. */
export function describeMarkers(markers, step) {
  const here = markers.filter((marker) => marker.step === step);
  const words = here.slice(0, MAX_WORDS).map(describeMarker);
  if (here.length > MAX_WORDS) words.push(`${here.length - MAX_WORDS} more`);
  return words.join(", ");
}

function describeMarker({ kind, request_id: requestId, note }) {
  const words = KINDS[kind]?.words || kind;
  if (kind === "bookmark") return note ? `bookmark: ${note}` : words;
  return requestId ? `${shortId(requestId)} ${words}` : words;
}

/** Draws markers between the first and the last step; `inset` is half the width of the slider's thumb, in CSS pixels. */
export class MarkerStrip {
  constructor(canvas, inset) {
    this.canvas = canvas;
    this.inset = inset;
    this.ctx = canvas.getContext("2d");
    this.theme = null;
    new ResizeObserver(() => this.paint()).observe(canvas);
    this.markers = [];
    this.range = { firstStep: 1, lastStep: 1, gaps: [] };
  }

  paint() {
    const { canvas, ctx, theme, range } = this;
    const ratio = devicePixelRatio || 1;
    const width = Math.max(1, Math.round(canvas.clientWidth * ratio));
    const height = Math.max(1, Math.round(canvas.clientHeight * ratio));
    Object.assign(canvas, { width, height }); // clears it
    if (!theme) return;
    const inset = this.inset * ratio;
    const span = Math.max(1, range.lastStep - range.firstStep);
    const x = (step) => Math.round(inset + ((width - 2 * inset) * (step - range.firstStep)) / span);
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
