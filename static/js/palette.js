// Colours of blocks and sequences. Everything that draws takes its colours from here, so that a slot
// looks the same in the grid, the batch strip and the request list, in every session and after a reload.

import { NO_SLOT, STATE } from "./wire.js";

/** Names of the block states, in the order of their numbers. */
export const STATES = ["free", "cached", "active", "tail", "shared", "reserved", "offloaded"];

const STATE_BITS = 4;
const GOLDEN_ANGLE_DEG = 137.508;

// Okabe-Ito for the first seven slots; the light theme has darker twins so that each keeps a contrast of 3:1 to white.
const FIRST_SLOTS_DARK = ["#e69f00", "#56b4e9", "#009e73", "#f0e442", "#0072b2", "#d55e00", "#cc79a7"];
const FIRST_SLOTS_LIGHT = ["#b87300", "#2787bf", "#007a59", "#8f8500", "#0058a3", "#bf4f00", "#a9528a"];
const DARK_INK = [10, 14, 19];
const LIGHT_INK = [255, 255, 255];
const LIGHTNESS_DARK = [0.78, 0.62, 0.7];
const LIGHTNESS_LIGHT = [0.6, 0.44, 0.52];

/** Colour of a slot as [r, g, b]: Okabe-Ito first, then golden-angle hues in three lightness steps. */
export function slotRgb(slot, light) {
  const first = light ? FIRST_SLOTS_LIGHT : FIRST_SLOTS_DARK;
  if (slot < first.length) return parseHex(first[slot]);
  const nth = slot - first.length;
  const lightness = (light ? LIGHTNESS_LIGHT : LIGHTNESS_DARK)[nth % 3];
  return oklchToRgb(lightness, 0.125, (nth * GOLDEN_ANGLE_DEG + 20) % 360);
}

/** "#rrggbb" → [r, g, b]. */
export function parseHex(hex) {
  const value = parseInt(hex.slice(1), 16);
  return [value >> 16, (value >> 8) & 255, value & 255];
}

/** CSS colour of [r, g, b], optionally with an alpha of 0 to 1. */
export function css(rgb, alpha = 1) {
  return alpha >= 1 ? `rgb(${rgb.join(" ")})` : `rgb(${rgb.join(" ")} / ${alpha})`;
}

/** a moved towards b by `share` (0 to 1). */
export function mix(a, b, share) {
  return a.map((channel, i) => Math.round(channel + (b[i] - channel) * share));
}

/** Contrast ratio of two colours as WCAG defines it. */
export function contrast(a, b) {
  const [x, y] = [luminance(a), luminance(b)].sort((p, q) => q - p);
  return (x + 0.05) / (y + 0.05);
}

/** Black or white, whichever reads better on `rgb`. */
export function inkOn(rgb) {
  return contrast(DARK_INK, rgb) > contrast(LIGHT_INK, rgb) ? DARK_INK : LIGHT_INK;
}

function luminance(rgb) {
  const [r, g, b] = rgb.map((channel) => toLinear(channel / 255));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}

function toLinear(c) {
  return c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
}

function toGamma(c) {
  const clipped = Math.min(1, Math.max(0, c));
  return Math.round(255 * (clipped <= 0.0031308 ? 12.92 * clipped : 1.055 * clipped ** (1 / 2.4) - 0.055));
}

// Björn Ottosson's OKLab, inverse direction; the matrix constants are his.
function oklchToRgb(lightness, chroma, hueDeg) {
  const hue = (hueDeg * Math.PI) / 180;
  const a = chroma * Math.cos(hue);
  const b = chroma * Math.sin(hue);
  const l = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3;
  const m = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3;
  const s = (lightness - 0.0894841775 * a - 1.291485548 * b) ** 3;
  return [
    toGamma(4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s),
    toGamma(-1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s),
    toGamma(-0.0041960863 * l - 0.7034186147 * m + 1.707614701 * s),
  ];
}

/**
 * The colours of the page's theme, read from its style sheet (CSS variables), so that CSS stays the one
 * place where a theme is written down. System colours of forced-colors mode resolve here too.
 */
export function readTheme(root = document.documentElement) {
  const probe = document.createElement("i"); // a used colour, unlike a variable, has light-dark() and system colours resolved
  root.append(probe);
  const read = (name) => {
    probe.style.color = `var(--${name})`;
    return getComputedStyle(probe).color.match(/[\d.]+/g).slice(0, 3).map(Number);
  };
  const theme = { forced: matchMedia("(forced-colors: active)").matches, states: STATES.map((state) => read(`st-${state}`)) };
  for (const name of ["panel", "grid", "line", "text", "muted", "accent", "bad", "warn", "good", "prefill"]) theme[name] = read(name);
  theme.light = luminance(theme.panel) > 0.5;
  probe.remove();
  return theme;
}

/**
 * Colour table of the grid: `table[(state << shift) | (slot & mask)]` is an opaque RGBA pixel.
 * The slot `mask` stands for "no slot". A selection or a state filter dims everything else, which is
 * why selecting costs a new table and no per-block work.
 */
export function buildTable({ theme, mode, numSlots, selectedSlot = -1, onlyState = -1 }) {
  const shift = Math.ceil(Math.log2(numSlots + 1));
  const stride = 1 << shift;
  const mask = stride - 1;
  const table = new Uint32Array(stride << STATE_BITS);
  for (let state = 0; state < STATES.length; state++) {
    for (let slot = 0; slot < stride; slot++) {
      if (slot > numSlots && slot !== mask) continue;
      let rgb = blockRgb(theme, mode, state, slot === mask ? NO_SLOT : slot);
      const isOther = selectedSlot >= 0 && !(slot === selectedSlot && isHeld(state));
      const isFiltered = onlyState >= 0 && state !== onlyState;
      if (isOther || isFiltered) rgb = mix(rgb, theme.grid, 0.78);
      table[(state << shift) | slot] = pack(rgb);
    }
  }
  return { table, shift, mask };
}

/** Colour of a block, undimmed. */
export function blockRgb(theme, mode, state, slot) {
  const plain = theme.states[state] ?? theme.bad;
  if (mode === "state" || slot === NO_SLOT) return plain;
  if (isHeld(state)) return slotRgb(slot, theme.light);
  // A cached block keeps a faded tint of its last owner.
  return state === STATE.CACHED ? mix(plain, slotRgb(slot, theme.light), 0.25) : plain;
}

/** Whether a block of this state is held, by a sequence or for a copy on its way. */
export function isHeld(state) {
  return state >= STATE.ACTIVE && state <= STATE.RESERVED;
}

function pack([r, g, b]) {
  return (255 << 24) | (b << 16) | (g << 8) | r;
}

/** Give every element with a data-slot attribute its colour as --slot, through one constructed style sheet. */
export class SlotStyles {
  constructor() {
    this.sheet = new CSSStyleSheet();
    document.adoptedStyleSheets.push(this.sheet);
  }

  update(theme, numSlots) {
    const rules = [];
    for (let slot = 0; slot < numSlots; slot++) {
      rules.push(`[data-slot="${slot}"]{--slot:${css(slotRgb(slot, theme.light))}}`);
    }
    this.sheet.replaceSync(rules.join(""));
  }
}
