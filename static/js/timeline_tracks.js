// The tracks of the timeline. Each: `name`, `share` of the height, `draw(chart, top, height)` which returns what the full
// height stands for, `text(at, chart)` for the label of a column and `words(at, chart)` for the line above the chart.

import { formatCount, formatMs } from "./format.js";
import { css, mix } from "./palette.js";
import { ROW_POLICIES, ROW_STALLED, ROW_SWAPPED_IN, ROW_SWAPPED_OUT, ROW_WAITED } from "./step_ring.js";
import { STATE } from "./wire.js";

const recomputed = (at, bins) => bins.preemptions[at] - bins.swaps[at];

// Of several signs in one lane the first one that fits is drawn; the words tell all.
const LANES = [
  [
    { count: recomputed, sign: "▼", color: "warn", words: "preempted, to be computed again" },
    { count: (at, bins) => bins.swaps[at], sign: "⇅", color: "prefill", words: "preempted, swapped out" },
  ],
  [{ count: (at, bins) => bins.evictions[at], sign: "✕", color: "muted", words: "blocks evicted" }],
  [{ count: (at, bins) => bins.hitBlocks[at], sign: "◆", color: "good", words: "blocks hit" }],
  [
    { flag: ROW_STALLED, sign: "!", color: "bad", words: "nothing could go on" },
    { flag: ROW_POLICIES, sign: "⚙", color: "accent", words: "policies changed" },
    { flag: ROW_SWAPPED_IN, sign: "↓", color: "prefill", words: "copies from the host tier begin" },
    { flag: ROW_SWAPPED_OUT, sign: "↑", color: "prefill", words: "copies to the host tier" },
    { flag: ROW_WAITED, sign: "…", color: "warn", words: "a step waited for a copy" },
  ],
];

const countOf = (entry, at, bins) => (entry.count ? entry.count(at, bins) : bins.flags[at] & entry.flag);
const wordsOf = (entry, at, bins) => (entry.count ? `${entry.count(at, bins)} ${entry.words}` : entry.words);

/** Entries of the lanes that happened in a column. */
export function happened(at, bins) {
  return LANES.flat().filter((entry) => countOf(entry, at, bins) > 0);
}

const memory = {
  name: "KV blocks",
  share: 0.23,
  draw(chart, top, height) {
    const { theme, bins, view } = chart;
    chart.bars(top, height, view.numBlocks, [
      { valueAt: (at) => bins.used[at], color: css(theme.states[STATE.ACTIVE]) },
      { valueAt: (at) => bins.cached[at], color: css(mix(theme.states[STATE.CACHED], theme.panel, 0.25)) },
    ]);
    return formatCount(view.numBlocks);
  },
  text: (at, { bins, view }) => `${Math.round((100 * bins.used[at]) / Math.max(1, view.numBlocks))}% used`,
  words: (at, chart) => `${memory.text(at, chart)}, ${formatCount(chart.bins.cached[at])} cached`,
};

const tokens = {
  name: "Batch tokens",
  share: 0.23,
  draw(chart, top, height) {
    const { theme, bins, view } = chart;
    const budget = view.hello.config.max_num_batched_tokens;
    // The budget stays in view, because how far away it is matters more than the shape of a low curve.
    const max = Math.max(budget, chart.highest((at) => bins.prefillTokens[at] + bins.decodeTokens[at]));
    chart.bars(top, height, max, [
      { valueAt: (at) => bins.decodeTokens[at], color: css(theme.states[STATE.TAIL]) },
      { valueAt: (at) => bins.prefillTokens[at], color: css(theme.prefill) },
    ]);
    chart.dash(top + height - Math.round((height * budget) / max), theme.muted);
    return formatCount(max);
  },
  text: (at, { bins }) => `${formatCount(bins.prefillTokens[at])} + ${formatCount(bins.decodeTokens[at])}`,
  words: (at, { bins }) => `${formatCount(bins.prefillTokens[at])} prefill + ${formatCount(bins.decodeTokens[at])} decode tokens`,
};

const queues = {
  name: "Requests",
  share: 0.16,
  draw(chart, top, height) {
    const { theme, bins } = chart;
    const max = chart.highest((at) => bins.running[at] + bins.waiting[at]);
    chart.bars(top, height, max, [
      { valueAt: (at) => bins.running[at], color: css(theme.states[STATE.ACTIVE]) },
      { valueAt: (at) => bins.waiting[at], color: css(theme.warn) },
    ]);
    return max > 0 ? formatCount(max) : "";
  },
  text: (at, { bins }) => `${bins.running[at]} run, ${bins.waiting[at]} wait`,
  words: (at, { bins }) => `${bins.running[at]} running, ${bins.waiting[at]} waiting`,
};

const time = {
  name: "Step time",
  share: 0.16,
  draw(chart, top, height) {
    const { theme, bins } = chart;
    const max = chart.highest((at) => bins.stepMs[at]);
    chart.bars(top, height, max, [{ valueAt: (at) => bins.stepMs[at], color: css(mix(theme.text, theme.panel, 0.45)) }]);
    return max > 0 ? formatMs(max) : "";
  },
  text: (at, { bins }) => formatMs(bins.stepMs[at]),
  words: (at, { bins }) => formatMs(bins.stepMs[at]),
};

const events = {
  name: "Events",
  share: 0.22,
  draw(chart, top, height) {
    const { ctx, theme, bins } = chart;
    const laneHeight = height / LANES.length;
    LANES.forEach((lane, i) => {
      for (const [x, at] of chart.columns()) {
        const entry = lane.find((each) => countOf(each, at, bins) > 0);
        if (!entry) continue;
        ctx.fillStyle = css(theme[entry.color]);
        chart.sign(entry.sign, x, top + i * laneHeight, laneHeight);
      }
    });
    ctx.fillStyle = css(theme.bad);
    for (const step of chart.aborts) {
      const column = Math.floor(step / bins.width);
      if (column >= chart.firstColumn) chart.sign("■", chart.x(column), top, laneHeight);
    }
    return "";
  },
  text: (at, { bins }) => happened(at, bins).map((entry) => (entry.count ? `${entry.sign} ${entry.count(at, bins)}` : entry.sign)).join("  "),
  words: (at, { bins }) => happened(at, bins).map((entry) => wordsOf(entry, at, bins)).join(", "),
};

/** From top to bottom. */
export const TRACKS = [memory, tokens, queues, time, events];
