// The bar under a recording: play, step, speed, scrub, jump, bookmark, link. It tells a `ReplayStream` what people want and
// shows where that is.

import { formatCount } from "./format.js";
import { MarkerStrip, describeMarkers, findMarker, wordMarkers } from "./replay_markers.js";
import { describeRefusal } from "./replay_chunks.js";
import { linkRequest } from "./replay_follow.js";

const THUMB_CSS = 16;
const FAR_STEPS = 10;
const FARTHER_STEPS = 100;
const COPIED_MS = 2000;

const byId = (id) => document.getElementById(id);

function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Words with a link in them only change when they must: a link that has the focus keeps it. */
function writeWords(element, parts) {
  const nodes = parts.filter(Boolean).flatMap((part) => [" · ", ...(part.requestId ? [linkRequest(part.requestId), ` ${part.words}`] : [part.words ?? part])]).slice(1);
  if (element.textContent !== nodes.map((node) => node.textContent ?? node).join("")) element.replaceChildren(...nodes);
}

/** Wires the controls. `links()` gives the address of this moment; `announce(text)` says something. */
export class ReplayBar {
  #stream;
  #links;
  #announce;
  #markers = [];
  #problem = "";
  #isTruncated = false;
  #copiedTimer = 0;

  constructor(stream, { links, announce }) {
    this.#stream = stream;
    this.#links = links;
    this.#announce = announce;
    this.slider = byId("replay-slider");
    this.strip = new MarkerStrip(byId("replay-markers"), byId("replay-tip"), { inset: THUMB_CSS / 2, onpick: (step) => this.goTo(step) });
    this.#bindMoves();
    this.#bindForms();
    let list = byId("bookmarks");
    document.addEventListener("htmx:after:swap", () => {
      if (byId("bookmarks") === list) return;
      list = byId("bookmarks");
      this.loadMarkers();
    });
  }

  /** For `bindKeys`: keys that do one thing. */
  get keys() {
    return {
      Space: () => this.#toggle(),
      BracketLeft: () => this.#jump(-1),
      BracketRight: () => this.#jump(1),
      KeyP: () => this.#jump(1, "preempt"),
      KeyG: () => this.#focusStep(),
      KeyB: () => this.#openBookmark(),
      KeyY: () => this.#copy(),
      KeyL: () => byId("replay-live").hidden || location.assign(byId("replay-live").href),
    };
  }

  /** For `bindKeys`: keys that may be held down; Shift goes ten times as far, Alt a hundred times. */
  get steps() {
    const far = (event) => (event.altKey ? FARTHER_STEPS : event.shiftKey ? FAR_STEPS : 1);
    return {
      Home: () => this.goTo(this.#stream.range.firstStep),
      End: () => this.goTo(this.#stream.range.lastStep),
      ArrowLeft: (event) => this.#stream.stepBy(-far(event)),
      ArrowRight: (event) => this.#stream.stepBy(far(event)),
    };
  }

  set theme(theme) {
    this.strip.theme = theme;
    this.strip.paint();
  }

  /** Show where the stream is. */
  update() {
    const { wanted, range, playing } = this.#stream;
    const { slider } = this;
    if (slider.min !== String(range.firstStep)) slider.min = range.firstStep;
    if (slider.max !== String(range.lastStep)) this.#stretch(range);
    if (slider.valueAsNumber !== wanted) slider.value = wanted;
    slider.setAttribute("aria-valuetext", `step ${formatCount(wanted)} of ${formatCount(range.lastStep)}`);
    const field = byId("replay-goto");
    if (document.activeElement !== field) field.value = wanted;
    const play = byId("replay-play");
    play.setAttribute("aria-pressed", String(playing));
    setText(play, playing ? "Pause" : "Play");
    byId("bookmark-step").value = wanted;
    setText(byId("replay-last"), formatCount(range.lastStep));
    const live = byId("replay-live");
    live.hidden = !range.isRunning;
    setText(live, range.isRunning && range.lastStep > wanted ? `Live, ${formatCount(range.lastStep - wanted)} steps on` : "Live");
    this.#writeNote(wanted);
  }

  #stretch(range) {
    this.slider.max = byId("replay-goto").max = range.lastStep;
    byId("replay-goto").min = range.firstStep - 1;
    this.strip.range = range;
    this.strip.paint();
  }

  #writeNote(step) {
    const gap = this.#stream.gapAt(step + 1);
    const parts = [
      this.#problem,
      ...wordMarkers(this.#markers, step),
      gap ? `steps ${formatCount(gap.first_step)} to ${formatCount(gap.first_step + gap.num_steps - 1)} were not recorded` : "",
      this.#isTruncated ? "only the first 10,000 markers are shown" : "",
    ];
    writeWords(byId("replay-note"), parts);
  }

  /** Fetch what there is to jump to. */
  async loadMarkers() {
    try {
      const response = await fetch(`/api/sessions/${encodeURIComponent(this.#stream.session)}/markers`);
      if (!response.ok) throw new Error(await describeRefusal(response));
      const { items, truncated } = await response.json();
      this.#markers = this.strip.markers = items;
      this.#isTruncated = Boolean(truncated);
      this.#problem = "";
    } catch (error) {
      this.#problem = `Markers cannot be read: ${error.message}`;
    }
    this.strip.range = this.#stream.range;
    this.strip.paint();
    this.update();
  }

  // ---- what people do ----

  #bindMoves() {
    const { slider } = this;
    slider.addEventListener("input", () => this.goTo(slider.valueAsNumber, { dragging: true }));
    slider.addEventListener("change", () => this.goTo(slider.valueAsNumber));
    const clicks = {
      "replay-play": () => this.#toggle(),
      "replay-back": () => this.#stream.stepBy(-1),
      "replay-forward": () => this.#stream.stepBy(1),
      "replay-prev-marker": () => this.#jump(-1),
      "replay-next-marker": () => this.#jump(1),
      "replay-copy": () => this.#copy(),
      "replay-bookmark": () => this.#openBookmark(),
      "bookmark-cancel": () => byId("bookmark-dialog").close(),
    };
    for (const [id, action] of Object.entries(clicks)) byId(id).addEventListener("click", action);
    const [speed, pace] = [byId("replay-speed"), byId("replay-pace")];
    const take = () => Object.assign(this.#stream, { speed: Number(speed.value), pace: pace.value });
    speed.addEventListener("change", take);
    pace.addEventListener("change", take);
    take(); // a browser may keep what was chosen over a reload
  }

  #bindForms() {
    byId("replay-go").addEventListener("submit", (event) => {
      event.preventDefault();
      this.goTo(byId("replay-goto").valueAsNumber);
      byId("replay-goto").blur(); // the keys work again
    });
    byId("replay-goto").addEventListener("keydown", (event) => {
      if (event.key !== "Escape") return;
      event.currentTarget.value = this.#stream.wanted;
      event.currentTarget.blur();
    });
    byId("bookmark-form").addEventListener("submit", () => byId("bookmark-dialog").close());
    byId("replay").addEventListener("click", (event) => {
      const link = event.target.closest("#bookmarks a");
      if (!link || event.ctrlKey || event.metaKey || event.shiftKey || event.button !== 0) return;
      event.preventDefault();
      this.goTo(Number(link.dataset.step));
    });
  }

  #toggle() {
    if (this.#stream.playing) this.#stream.pause();
    else this.#stream.play();
  }

  /** Rest at a step. */
  goTo(step, options) {
    if (!Number.isFinite(step)) return;
    this.#stream.pause();
    this.#stream.seek(step, options);
    this.update();
  }

  #jump(direction, kind = "") {
    const marker = findMarker(this.#markers, this.#stream.wanted, direction, kind);
    if (marker) this.goTo(marker.step, { direction }); // over a gap, not back to where it begins
    this.#announce(marker ? `Step ${marker.step}: ${describeMarkers(this.#markers, marker.step)}` : `No ${direction > 0 ? "later" : "earlier"} ${kind || "marker"}`);
  }

  #focusStep() {
    byId("replay-goto").focus();
    byId("replay-goto").select();
  }

  #openBookmark() {
    this.#stream.pause();
    byId("bookmark-step").value = this.#stream.wanted;
    setText(byId("bookmark-at"), formatCount(this.#stream.wanted));
    byId("bookmark-note").value = "";
    byId("bookmark-dialog").showModal();
  }

  async #copy() {
    const button = byId("replay-copy");
    const link = this.#links();
    try {
      await navigator.clipboard.writeText(link);
      setText(button, "Copied");
      this.#announce("The link to this step is copied");
    } catch {
      history.replaceState(null, "", link); // no clipboard here (plain http): the address bar has it
      setText(button, "It is in the address bar");
    }
    clearTimeout(this.#copiedTimer);
    this.#copiedTimer = setTimeout(() => setText(button, "Copy link"), COPIED_MS);
  }
}
