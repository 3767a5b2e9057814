'use strict';
// Elements and numbers. All text is inserted as text, never as HTML, because logs and reasons come from outside.
const $ = id => document.getElementById(id);
function h(tag, props, ...children) {
  const made = document.createElement(tag);
  for (const [key, value] of Object.entries(props || {})) {
    if (key.startsWith('on')) made.addEventListener(key.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) made.setAttribute(key, value);
  }
  made.append(...children.filter(child => child !== null));
  return made;
}
function s(tag, props, ...children) {
  const made = document.createElementNS('http://www.w3.org/2000/svg', tag);
  for (const [key, value] of Object.entries(props || {})) made.setAttribute(key, value);
  made.append(...children);
  return made;
}
function fill(place, ...children) { place.replaceChildren(...children.filter(child => child !== null)); }
function text(place, words) { if (place.textContent !== words) place.textContent = words; }
// Draws a place again only when its content has changed, so that focus and scroll position stay.
function once(place, key, make) {
  const now = JSON.stringify(key);
  if (place.drawn !== now) { place.drawn = now; make(); }
}

// ---- numbers that the page computes; figures of the run come as texts (runtime/figures/forms.py)
const none = '–';
const known = value => value !== null && value !== undefined;
function si(value, unit = '') {
  let n = 0;
  for (; Math.abs(value) >= 999.5 && n < 5; n++) value /= 1000;
  const digits = value === 0 || (n === 0 && Number.isInteger(value)) ? value.toFixed(0) : value.toPrecision(3);
  return digits + (unit ? ' ' : '') + ['', 'k', 'M', 'G', 'T', 'P'][n] + unit;
}
// A round number of an axis.
const short = value => si(value).replace(/(\.\d*?)0+(?=\D?$)/, '$1').replace(/\.(?=\D?$)/, '');
const share = value => known(value) ? (100 * value).toFixed(value > 0.9995 || value === 0 ? 0 : 1) + '%' : none;
function time(seconds) {
  if (!known(seconds)) return none;
  if (Math.abs(seconds) < 0.9995) return Math.round(1000 * seconds) + ' ms';
  if (seconds < 10) return seconds.toFixed(2) + ' s';
  const whole = Math.round(seconds), pad = number => String(number).padStart(2, '0');
  if (whole < 60) return whole + ' s';
  if (whole < 3600) return Math.floor(whole / 60) + ' min ' + pad(whole % 60) + ' s';
  if (whole < 86400) return Math.floor(whole / 3600) + ' h ' + pad(Math.floor(whole / 60) % 60) + ' min';
  return Math.floor(whole / 86400) + ' d ' + pad(Math.floor(whole / 3600) % 24) + ' h';
}
const date = seconds => new Date(1000 * seconds).toISOString().slice(0, 16).replace('T', ' ') + ' UTC';
const colour = index => index < 8 ? 'k' + index : 'many';
