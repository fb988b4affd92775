// Dark, light or as the system has it. The server reads the cookie, so that a page never flashes.

import { readTheme } from "./palette.js";

const COOKIE = "pageglass_theme";
const COOKIE_SECONDS = 365 * 24 * 3600;
const MEDIA = ["(prefers-color-scheme: light)", "(forced-colors: active)"];

/**
 * Wires the theme controls; calls `onchange(theme)` with the resolved colours, at once and after every change.
 * A page may lack `select`.
 */
export function bindTheme({ button, select, onchange = () => {} }) {
  const root = document.documentElement;
  const tell = () => onchange(readTheme(root));
  const set = (name) => {
    root.dataset.theme = name;
    if (select) select.value = name;
    document.cookie = `${COOKIE}=${name}; path=/; max-age=${COOKIE_SECONDS}; samesite=strict`;
    tell();
  };
  const flip = () => set(readTheme(root).light ? "dark" : "light");
  button.addEventListener("click", flip);
  select?.addEventListener("change", () => set(select.value));
  for (const query of MEDIA) matchMedia(query).addEventListener("change", tell);
  tell();
  return flip;
}
