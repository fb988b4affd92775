// The page of a recorded session: the engine view over a ReplayStream, its bar, and its address.

import { EnginePage, exposePage } from "./engine_page.js";
import { formatCount } from "./format.js";
import { ReplayBar } from "./replay_bar.js";
import { Follow } from "./replay_follow.js";
import { ReplayStream } from "./replay_stream.js";
import { stepRates } from "./status_bar.js";

const ADDRESS_MS = 250;
const PANELS_MS = 250;
const MARKERS_MS = 5000;

const byId = (id) => document.getElementById(id);

const root = byId("replay");
const { session } = root.dataset;
const address = new URL(location.href);

function rangeOf({ firstStep, lastStep, running, gaps }) {
  return { firstStep: Number(firstStep), lastStep: Number(lastStep), isRunning: running === "true", gaps: JSON.parse(gaps) };
}

/** Calls `action` at once and then at most once in so many milliseconds, the last time too. */
function throttle(action, ms) {
  let timer = 0;
  let isDue = false;
  const fire = () => {
    timer = 0;
    if (!isDue) return;
    isDue = false;
    timer = setTimeout(fire, ms);
    action();
  };
  return () => {
    isDue = true;
    timer ||= setTimeout(fire);
  };
}

let panelsStep = -1;
let markersAt = performance.now();
let isAsking = false;

const askPanels = throttle(() => {
  if (panelsStep === page.view.step) return;
  panelsStep = page.view.step;
  byId("replay-step").value = Math.max(0, panelsStep);
  document.body.dispatchEvent(new CustomEvent("engine:tick"));
}, PANELS_MS);

const writeAddress = throttle(() => {
  if (page.source.playing) return;
  history.replaceState(null, "", linkHere());
  document.title = document.title.replace(/^Step [\d,]+/, `Step ${formatCount(page.source.wanted)}`);
}, ADDRESS_MS);

function linkHere() {
  const url = new URL(address.pathname, location.href);
  url.searchParams.set("step", page.source.wanted);
  if (follow.request) url.searchParams.set("request", follow.request);
  else if (follow.seq !== null) url.searchParams.set("seq", follow.seq);
  return url.href;
}

function writeWhen({ view }) {
  if (view.tMs > 0) {
    const [day, time] = new Date(view.tMs).toISOString().split("T");
    byId("stat-when").textContent = `${time.slice(0, 12)}`;
    byId("stat-day").textContent = `${day} UTC`;
  }
  return stepRates(view.steps);
}

function describeOutage(view, { reason, retryAt, refused }, now) {
  const parts = [`The recording cannot be read: ${reason}`];
  if (view.step >= 0) parts.push(`the picture is that of step ${formatCount(view.step)}`);
  if (!refused && retryAt !== null) parts.push(`next try in ${Math.max(1, Math.ceil((retryAt - now) / 1000))} s`);
  return `${parts.join("; ")}.`;
}

/** A running session grows. */
async function askRange() {
  if (isAsking || !page.source.range.isRunning || page.source.hidden) return;
  isAsking = true;
  try {
    const response = await fetch(`/api/sessions/${encodeURIComponent(session)}`);
    if (response.ok) takeRange(await response.json());
  } catch {
    // The server is gone; as soon as a step is wanted that is not here, the banner says so.
  }
  isAsking = false;
}

function takeRange({ first_step: firstStep, last_step: lastStep, status, gaps }) {
  const hasGrown = lastStep !== page.source.range.lastStep;
  page.source.setRange({ firstStep, lastStep, gaps, isRunning: status === "running" });
  bar.update();
  if (!hasGrown || performance.now() - markersAt < MARKERS_MS) return;
  markersAt = performance.now();
  bar.loadMarkers();
}

function onplay(playing) {
  bar.update();
  if (playing) return;
  writeAddress();
  page.labelSoon();
}

const page = new EnginePage({
  makeSource: (view, listeners) => new ReplayStream(view, { session, range: rangeOf(root.dataset), step: Number(root.dataset.step), onplay, ...listeners }),
  refreshPanels: askPanels,
  writePace: writeWhen,
  describeOutage,
  everySecond: askRange,
  ontheme: (theme) => (bar.theme = theme),
  onpick: (slot) => follow.pick(slot),
  onmove() {
    follow.update();
    bar.update();
    writeAddress();
  },
  keys: () => bar.keys,
  steps: () => bar.steps,
});
const follow = new Follow(
  page,
  { seq: address.searchParams.get("seq"), request: address.searchParams.get("request"), unknown: root.dataset.unknownRequest },
  writeAddress,
);
const bar = new ReplayBar(page.source, { links: linkHere, announce: (text) => page.announcer.say(text) });
page.timeline.canvas.addEventListener("click", () => {
  const { hoverStep, hoverPreemption } = page.timeline;
  if (hoverStep >= 0) bar.goTo(hoverPreemption >= 0 ? hoverPreemption : hoverStep);
});
page.start();
bar.update();
bar.loadMarkers();
exposePage(page);
