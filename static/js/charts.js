// Charts of a session's numbers per second, with uPlot. Times are UTC, as everywhere on the pages.

import uPlot from "../vendor/uplot-1.6.32/uPlot.esm.js";
import { css } from "./palette.js";

const REFRESH_MS = 5000;
const HEIGHT_PX = 158; // the legend is below
const TICK_SPACE_PX = 64;
const POINTS = 300; // as many as the table below has
const MIN_AXIS_PX = 46;
const AXIS_ROOM_PX = 18; // tick and gap beside the numbers
const CHAR_PX = 6.5;
const SYNC_KEY = "session";

const number = new Intl.NumberFormat("en-US", { maximumFractionDigits: 1 });

/** What is drawn: `read(item)` gives a value, or null for none; `rest` is that of spans without a step, or gives it. */
const CHARTS = [
  {
    title: "Tokens per second",
    lines: [
      { label: "prefill", color: "prefill", read: (item) => item.prefill_tokens_per_s, rest: 0 },
      { label: "decode", color: "good", read: (item) => item.decode_tokens_per_s, rest: 0, dash: [6, 3] },
    ],
  },
  {
    title: "Sequences running and waiting",
    lines: [
      { label: "running", color: "accent", read: (item) => item.max_running, rest: (item) => item.num_running },
      { label: "waiting", color: "warn", read: (item) => item.max_waiting, rest: (item) => item.num_waiting, dash: [6, 3] },
    ],
  },
  {
    title: "KV blocks, % of all",
    lines: [
      { label: "used", color: "accent", read: (item) => percent(item, item.num_used) },
      { label: "cached", color: "muted", read: (item) => percent(item, item.num_cached), dash: [6, 3] },
    ],
    range: [0, 100],
  },
  {
    title: "Time to first token, mean in ms",
    lines: [{ label: "TTFT", color: "prefill", read: (item) => item.ttft_avg_ms, rest: null, isDotted: true }],
  },
];

/** Seconds of Unix time as a UTC clock shows them. */
const clock = (seconds) => new Date(seconds * 1000).toISOString().slice(11, 19);

/** A clock time; the first one, and the first of each day, with the day. */
function formatTick(seconds, i, ticks) {
  const day = (at) => new Date(at * 1000).toISOString().slice(0, 10);
  return i === 0 || day(seconds) !== day(ticks[i - 1]) ? `${clock(seconds)}\n${day(seconds)}` : clock(seconds);
}

function percent(item, count) {
  const total = item.num_free + item.num_cached + item.num_used;
  return total ? (100 * count) / total : null;
}

const valueOf = (rest, item) => (typeof rest === "function" ? rest(item) : rest);

/**
 * The width of a y-axis that holds its numbers.
 * @param {string[]|null} labels
 */
export const axisWidth = (labels) => Math.max(MIN_AXIS_PX, AXIS_ROOM_PX + CHAR_PX * Math.max(0, ...(labels ?? []).map((label) => label.length)));

/**
 * The columns of all charts from an answer of `/api/sessions/{id}/metrics`. Spans that may still grow are left
 * out. Where seconds without steps were left out, rates fall to 0 and counts stay as they were.
 * @returns {{times: number[], steps: number[], columns: Map<string, (number|null)[]>}}
 */
export function toColumns({ width_s: width, items }) {
  const times = [];
  const steps = [];
  const columns = new Map(CHARTS.flatMap(({ lines }) => lines.map(({ label }) => [label, []])));
  const push = (time, item, isRest) => {
    times.push(time);
    steps.push(item.last_step);
    for (const { lines } of CHARTS) {
      for (const { label, read, rest = read } of lines) columns.get(label).push(isRest ? valueOf(rest, item) : read(item));
    }
  };
  let before = null;
  for (const item of items) {
    if (!item.is_complete) continue;
    if (before !== null && item.unix > before.unix + width) {
      push(before.unix + width, before, true);
      if (item.unix > before.unix + 2 * width) push(item.unix - width, before, true);
    }
    push(item.unix, item, false);
    before = item;
  }
  return { times, steps, columns };
}

/** One session's charts inside `root`. */
class SessionCharts {
  constructor(root) {
    this.root = root;
    this.plots = [];
    this.theme = null;
    this.data = null;
    this.load();
    if (root.hasAttribute("data-live")) {
      setInterval(() => document.hidden || this.load(), REFRESH_MS);
      root.parentElement.addEventListener("toggle", () => this.refreshTable(), true);
    }
    new ResizeObserver(() => this.resize()).observe(root);
  }

  async load() {
    const response = await fetch(`${this.root.dataset.charts}?points=${POINTS}`).catch(() => null);
    if (!response?.ok) return; // the page says why history cannot be read
    this.data = toColumns(await response.json());
    if (!this.data.times.length) return;
    if (this.plots.length) this.plots.forEach((plot, i) => plot.setData(this.columnsOf(CHARTS[i])));
    else this.draw();
    if (this.root.hasAttribute("data-live")) this.refreshTable();
  }

  /** Fetch the table anew while it is seen, or as long as there is none. */
  refreshTable() {
    const section = this.root.parentElement;
    const table = section.querySelector("details");
    if (!table || table.open) section.dispatchEvent(new CustomEvent("charts:tick"));
  }

  setTheme(theme) {
    this.theme = theme;
    if (this.plots.length) this.draw();
  }

  draw() {
    if (!this.theme) return;
    for (const plot of this.plots) plot.destroy();
    this.plots = CHARTS.map((chart, i) => new uPlot(this.options(chart), this.columnsOf(chart), this.slot(chart, i)));
  }

  columnsOf({ lines }) {
    return [this.data.times, ...lines.map(({ label }) => this.data.columns.get(label))];
  }

  slot({ title }, i) {
    let figure = this.root.children[i];
    if (!figure) {
      figure = document.createElement("figure");
      figure.className = "chart";
      const caption = document.createElement("figcaption");
      caption.textContent = title;
      const plot = document.createElement("div");
      plot.className = "plot";
      figure.append(caption, plot);
      this.root.append(figure);
    }
    return figure.lastElementChild;
  }

  options({ title, lines, range }) {
    const { theme } = this;
    const axis = { stroke: css(theme.text), grid: { stroke: css(theme.line), width: 1 }, ticks: { stroke: css(theme.line), width: 1 }, font: "11px system-ui, sans-serif" };
    return {
      width: this.width(),
      height: HEIGHT_PX,
      cursor: { sync: { key: SYNC_KEY }, bind: { click: (plot, target, handler) => (event) => (handler(event), this.open(plot)) } },
      legend: { live: true },
      scales: { y: { range: (_, __, max) => range ?? [0, Math.max(1, max * 1.1)] } },
      axes: [{ ...axis, space: TICK_SPACE_PX, values: (_, ticks) => ticks.map(formatTick) }, { ...axis, size: (_, labels) => axisWidth(labels), values: (_, ticks) => ticks.map((tick) => number.format(tick)) }],
      series: [
        { label: "UTC", value: (_, seconds) => (seconds === null ? "–" : clock(seconds)) },
        ...lines.map(({ label, color, dash, isDotted }) => ({
          label,
          dash,
          stroke: css(theme[color]),
          width: 1.6,
          paths: isDotted ? () => null : undefined, // between two of these nothing is known
          points: isDotted ? { show: true, size: 6 } : { size: 4 },
          value: (_, value) => (value === null || value === undefined ? "–" : number.format(value)),
        })),
      ],
      hooks: {
        ready: [(plot) => {
          plot.over.parentElement.setAttribute("role", "img");
          plot.over.parentElement.setAttribute("aria-label", `${title}; the table below has the numbers`);
          plot.over.title = "Click to open this moment in the engine view";
        }],
      },
    };
  }

  /** Go to the step at the cursor. */
  open(plot) {
    const { idx } = plot.cursor;
    if (idx === null || idx === undefined) return;
    location.assign(`/s/${encodeURIComponent(this.root.dataset.session)}?step=${this.data.steps[idx]}`);
  }

  width() {
    const plot = this.root.querySelector(".plot");
    return Math.max(200, plot ? plot.clientWidth : 320);
  }

  resize() {
    const width = this.width();
    for (const plot of this.plots) {
      if (plot.width !== width) plot.setSize({ width, height: HEIGHT_PX });
    }
  }
}

/** Draws the charts of the page, also of parts that come later; returns `setTheme(theme)` for all of them. */
export function bindCharts(page) {
  const bound = new Map();
  let theme = null;
  const look = () => {
    for (const root of page.querySelectorAll("[data-charts]")) {
      if (bound.has(root)) continue;
      const charts = new SessionCharts(root);
      if (theme) charts.setTheme(theme);
      bound.set(root, charts);
    }
  };
  look();
  page.addEventListener("htmx:after:swap", look);
  return {
    setTheme(next) {
      theme = next;
      for (const charts of bound.values()) charts.setTheme(next);
    },
  };
}
