// The chat page. The server renders all that is said; here is what grows, what is lit, and the keys.

import { MiniGrid } from "./chat_grid.js";
import { bindParams } from "./chat_params.js";
import { AnswerStream } from "./chat_stream.js";
import { Announcer } from "./announcer.js";
import { bindTheme } from "./theme.js";

const NEAR_END_PX = 80;
const COPIED_MS = 1500;
const GAP_MS = 100;

const byId = (id) => document.getElementById(id);

const composer = byId("composer");
const text = byId("text");
const panel = document.querySelector(".chat-panel");
const announcer = new Announcer(byId("announcer"));
const grid = new MiniGrid(document.querySelector(".mini-grid"), { onengine: showEngine });
let stream = null;
let numAsking = 0; // requests of this page that are under way
let follows = true; // the reader is at the end of the log

// ---- the growing answer ----

function connect() {
  const element = document.querySelector("[data-stream]");
  if (stream && stream.element === element) return;
  stream?.close();
  stream = null;
  grid.light(-1, -1);
  if (element) stream = new AnswerStream(element, { ontext: keepUp, onstats, onend });
  shareConnection();
}

/** A page that nobody sees, and one that has to ask for something, gives its stream's connection to others. */
function shareConnection() {
  if (document.hidden || numAsking > 0) stream?.pause();
  else stream?.resume();
}

/**
 * Make way for a request. Every page asks every few seconds what is recorded, so that also with more windows in sight
 * than a browser has connections each gets its turn. `ctx` is htmx's, whose end no event tells if its element is gone.
 */
function makeWay({ detail: { ctx } }) {
  const { fetch } = ctx;
  ctx.fetch = async (...request) => {
    numAsking++;
    shareConnection();
    try {
      return await fetch(...request);
    } finally {
      setTimeout(() => {
        numAsking--;
        shareConnection();
      }, GAP_MS);
    }
  };
}

function onstats({ seq_id: seqId, slot }) {
  grid.light(seqId, slot);
}

function onend(element) {
  grid.light(-1, -1);
  announcer.say("The answer is complete.");
  element.closest(".turn").dispatchEvent(new CustomEvent("chat:ended"));
}

/** On a desk the log scrolls; on a phone the page does, and the end of the chat is not the end of the page. */
function scrollsInside() {
  return getComputedStyle(byId("log")).overflowY !== "visible";
}

function keepUp() {
  if (!follows) return;
  if (scrollsInside()) byId("log").scrollTop = byId("log").scrollHeight;
  else panel.scrollIntoView({ block: "end" });
}

function noteScroll() {
  const log = byId("log");
  const below = scrollsInside()
    ? log.scrollHeight - log.scrollTop - log.clientHeight
    : Math.abs(panel.getBoundingClientRect().bottom - innerHeight);
  follows = below < NEAR_END_PX;
}

// ---- copying ----

function addCopyButtons() {
  for (const code of document.querySelectorAll(".markdown pre:not(.code-box > pre)")) {
    const box = document.createElement("div");
    box.className = "code-box";
    code.replaceWith(box);
    const button = document.createElement("button");
    button.type = "button";
    button.className = "copy-code";
    button.textContent = "Copy";
    button.setAttribute("aria-label", "Copy this code");
    box.append(code, button);
  }
}

async function copy(button, source, value) {
  try {
    await navigator.clipboard.writeText(value);
    const before = button.textContent;
    button.textContent = "Copied";
    announcer.say("Copied");
    setTimeout(() => { button.textContent = before; }, COPIED_MS);
  } catch {
    getSelection().selectAllChildren(source); // no clipboard here (plain http): leave it selected to be copied by hand
  }
}

function onclick(event) {
  const button = event.target.closest("button");
  if (button?.classList.contains("copy-code")) {
    const code = button.parentElement.querySelector("pre");
    copy(button, code, code.textContent);
  } else if (button?.classList.contains("copy-answer")) {
    copy(button, button.closest(".answer").querySelector(".markdown"), button.dataset.text);
  }
}

// ---- the composer ----

function onkeydown(event) {
  if (event.isComposing) return;
  if (event.key === "Escape" && stream) stream.element.querySelector(".stop")?.click();
  if (event.target !== text || event.key !== "Enter" || event.shiftKey) return;
  event.preventDefault();
  if (text.value.trim() !== "") composer.requestSubmit();
}

/** What the frame around the chat refreshes is none of its business. */
function isOfFrame(element) {
  return element?.closest?.("#recording, .topbar") != null;
}

/** After each answer of the server: empty the box if it took the message, and pick up what is new. */
function onswap(event) {
  const { ctx } = event.detail;
  if (ctx.sourceElement?.id === "text-switch") byId("store-note").dispatchEvent(new CustomEvent("chat:kept"));
  if (isOfFrame(ctx.sourceElement)) return;
  const isAsked = ctx.sourceElement === composer && ctx.response?.status === 200;
  if (isAsked) {
    text.value = "";
    follows = true;
  }
  addCopyButtons();
  connect();
  if (isAsked || follows) keepUp();
  for (const field of document.querySelectorAll("[aria-invalid]")) field.removeAttribute("aria-invalid");
  for (const fault of document.querySelectorAll(".fault")) markField(fault.dataset.field);
}

function markField(name) {
  const field = name ? byId(name) : null;
  field?.setAttribute("aria-invalid", "true");
  field?.focus();
}

/** What htmx could not show by itself: no answer at all, or one that is no part of this page. */
function onfailure(event) {
  const { ctx } = event.detail;
  if (isOfFrame(event.target)) return;
  const status = ctx?.response?.status;
  if (status === 422 || status === 409) return; // shown by the server's own words
  const fault = document.createElement("p");
  fault.className = "fault";
  fault.textContent = status === 413 ? "This is far more than a chat takes; shorten it." : `${describeFailure(status)}. Reload the page to see where things are.`;
  byId("composer-faults").replaceChildren(fault);
}

function describeFailure(status) {
  if (status === undefined) return "The server does not answer";
  return status === 404 ? "This chat is not there any more" : `The server answered with error ${status}`;
}

function showEngine(status) {
  document.body.dataset.engine = status;
  const note = byId("engine-note");
  note.hidden = status === "ready";
  const words = {
    loading: "The model is still loading; questions can be answered once it is there.",
    failed: "The engine has failed; questions cannot be answered until the server is started again.",
    draining: "The server is shutting down; it takes no more questions.",
  };
  if (words[status]) note.textContent = words[status];
}

function start() {
  bindTheme({ button: byId("theme-button"), onchange: (theme) => grid.setTheme(theme) });
  bindParams(byId("params"));
  document.addEventListener("click", onclick);
  document.addEventListener("keydown", onkeydown);
  document.addEventListener("scroll", noteScroll, { capture: true, passive: true });
  document.addEventListener("visibilitychange", shareConnection);
  document.addEventListener("htmx:before:request", makeWay);
  document.addEventListener("htmx:after:swap", onswap);
  document.addEventListener("htmx:response:error", onfailure);
  document.addEventListener("htmx:error", onfailure);
  if (matchMedia("(max-width: 1099px)").matches) document.querySelector(".conversations-fold").open = false;
  addCopyButtons();
  connect();
  keepUp();
  grid.start();
  if (matchMedia("(pointer: fine)").matches) text.focus({ preventScroll: true }); // on a phone it would bring up the keyboard
}

start();

/** For tests and the console: what the page knows of the engine, and whose blocks are lit. */
window.pageglass = Object.freeze({
  view: grid.view,
  get litSlot() {
    return grid.grid.selectedSlot;
  },
});
