// Charts of lines over time or tokens.
// Lines that the reader has hidden, by chart and name.
const unseen = new Set();
// The range of an axis. `settles` is for losses: their last half fills at least half of the axis, so that their steep
// start may be above it.
function rangeOf(points, settles) {
  const xs = points.map(point => point[0]), half = (Math.min(...xs) + Math.max(...xs)) / 2, values = points.map(point => point[1]);
  const late = points.filter(point => point[0] >= half).map(point => point[1]), top = Math.max(...late);
  let [low, high] = [Math.min(...values), Math.max(...values)];
  if (settles) high = Math.min(high, top + Math.max(top - Math.min(...late), 0.02 * Math.abs(top)));
  return low === high ? [low - Math.abs(low) / 2, high + (Math.abs(high) / 2 || 1)] : [low, high];
}
// The parts of a line between its breaks, which are points without a value.
function pieces(points) {
  const found = [];
  let open = null;
  for (const point of points) {
    if (!known(point[1])) open = null;
    else if (open) open.push(point);
    else found.push(open = [point]);
  }
  return found;
}
// The point of a line nearest to a time; null where the line is broken.
const pointAt = (points, t) => (pieces(points).find(piece => piece[0][0] <= t && t <= piece[piece.length - 1][0]) || [])
  .reduce((best, point) => !best || Math.abs(point[0] - t) < Math.abs(best[0] - t) ? point : best, null);
// The mean of all lines and its surroundings: each point has the values within a fortieth of the axis. It is broken
// where all lines are.
function smoothed(lines) {
  const points = lines.flatMap(line => line.points).filter(point => known(point[1])).sort((a, b) => a[0] - b[0]);
  if (!points.length) return [];
  const [first, last] = [points[0][0], points[points.length - 1][0]], near = (last - first) / 40, found = [];
  const spans = lines.flatMap(line => pieces(line.points)).map(piece => [piece[0][0], piece[piece.length - 1][0]]);
  let from = 0, to = 0, sum = 0;
  for (let n = 0; n <= 160; n++) {
    const at = n < 160 ? first + (last - first) * n / 160 : last;
    for (; to < points.length && points[to][0] <= at + near; to++) sum += points[to][1];
    for (; points[from][0] < at - near; from++) sum -= points[from][1];
    if (!spans.some(span => span[0] <= at && at <= span[1])) found.push([at, null]);
    else if (to > from) found.push([at, sum / (to - from)]);
  }
  return found;
}
// How fast a column of totals grows, over the growth of another one, in about 60 intervals, and in none over a break.
function growth(points, top, over = 0) {
  const parts = pieces(points), last = parts.length ? parts[parts.length - 1] : [];
  const apart = last.length ? (last[last.length - 1][0] - parts[0][0][0]) / 60 : 0;
  return parts.flatMap((part, index) => [...(index ? [[null, null]] : []), ...growthOf(part, apart, top, over)]);
}
function growthOf(points, apart, top, over) {
  const intervals = [];
  let before = points[0], previous = before, due = apart + before[0];
  for (const point of points.slice(1)) {
    // Without a syncer nobody counts. What islands did meanwhile arrives a little after the gap.
    if (point[0] - previous[0] > apart) due = point[0] + apart;
    previous = point;
    if (point[0] < due || point[over] <= before[over]) continue;
    intervals.push([before, point]);
    before = point;
    due = point[0] + apart;
  }
  // The rest may be too short for a rate of its own.
  if (intervals.length) intervals[intervals.length - 1][1] = previous;
  else if (previous[0] - before[0] >= apart && previous[over] > before[over]) intervals.push([before, previous]);
  return intervals.map(([from, to]) => [(from[0] + to[0]) / 2, Math.max(0, to[top] - from[top]) / (to[over] - from[over])]);
}
function chart(place, legend, lines, xForm, {label, xTitle, yTitle, settles = false, marks = [], low: floor, yForm = null}) {
  const key = line => legend.id + ' ' + line.name, listed = lines;
  once(legend, listed.map(line => [line.name, line.style, unseen.has(key(line))]), () => fill(legend, ...listed.map(line =>
    h('li', {}, listed.length < 2 ? h('span', {}, h('i', {class: line.style}), line.name)
      : h('button', {class: 'line-name', 'aria-pressed': String(!unseen.has(key(line))), title: 'Show or hide this line',
        onclick: () => { if (!unseen.delete(key(line))) unseen.add(key(line)); draw(); legend.children[listed.indexOf(line)].firstChild.focus(); }},
      h('i', {class: line.style}), line.name)))));
  lines = lines.filter(line => !unseen.has(key(line)));
  const all = lines.flatMap(line => line.points).filter(point => known(point[1]));
  const width = Math.max(240, place.clientWidth), height = Math.min(420, Math.max(230, width * 0.45)), left = 46, top = 24, bottom = height - 38;
  if (!all.length) return fill(place, h('p', {class: 'soft'}, 'Nothing yet.'));
  const xs = all.map(point => point[0]), most = Math.max(...all.map(point => point[1]));
  let [low, high] = rangeOf(all, settles);
  low = Math.min(low, floor ?? low);
  const [first, last] = [Math.min(...xs), Math.max(...xs)], step = nice10((high - low || 1) / 5);
  [low, high] = [Math.floor(low / step) * step, Math.ceil(high / step) * step];
  const x = t => left + (t - first) / (last - first || 1) * (width - left - 8), y = value => bottom - (value - low) / (high - low || 1) * (bottom - top);
  const newest = line => pieces(line.points).flat().pop();
  const drawing = s('svg', {width, height, viewBox: `0 0 ${width} ${height}`, role: 'img', 'aria-label': label + ': ' + lines.map(line =>
    `${line.name} ${newest(line) ? newest(line)[1].toPrecision(4) : 'none'}`).join(', ')});
  for (let value = low; value <= high + step / 2; value += step) {
    drawing.append(s('path', {class: 'grid', d: `M${left} ${y(value)}H${width}`}), s('text', {x: left - 6, y: y(value) + 4, 'text-anchor': 'end'}, yForm ? yForm(value) : Math.abs(value) >= 1e4 ? short(value) : +value.toPrecision(4)));
  }
  const ticks = Math.max(2, Math.floor(width / 90)), apart = xForm === tick ? nice(last - first || 1, ticks) : nice10((last - first || 1) / ticks);
  for (let t = Math.ceil(first / apart) * apart, free = 0; t <= last; t += apart) {
    const words = xForm(t), long = 6.5 * words.length, from = Math.min(Math.max(x(t) - long / 2, left - 10), width - long);
    drawing.append(s('path', {class: 'grid', d: `M${x(t)} ${bottom}v4`}));
    if (from < free) continue;
    drawing.append(s('text', {x: from, y: bottom + 16}, words));
    free = from + long + 8;
  }
  const title = (at, words) => drawing.append(s('text', {class: 'axis-title', ...at}, words));
  title({x: (left + width) / 2, y: height - 5, 'text-anchor': 'middle'}, xTitle);
  title({x: 0, y: 12}, yTitle);
  if (most > high) title({x: width, y: 12, 'text-anchor': 'end'}, `values up to ${+most.toPrecision(3)} are above the axis`);
  // It cuts lines at the edges of the axes; a margin is for whole dots.
  const frame = {x: left - 5, y: top - 2, width: width - left + 5, height: bottom - top + 8};
  const inside = s('svg', {...frame, viewBox: Object.values(frame).join(' ')});
  for (const event of marks) {
    if (event.t <= first || event.t >= last) continue;
    const style = event.kind === 'joined' ? ' good' : event.kind === 'fault' ? ' fault' : '', at = x(event.t).toFixed(1);
    inside.append(s('path', {class: 'mark' + style, d: `M${at} ${top}V${bottom}`},
      s('title', {}, event.what || `${event.who.join(', ')} ${event.kind} after ${time(event.t)}`)));
    if (event.label && width > 700) drawing.append(s('text', {class: 'number', x: at, y: top - 3, 'text-anchor': 'middle'}, event.label));
  }
  if (marks.length && moment !== null && moment >= first && moment <= last) inside.append(s('path', {class: 'cross', d: `M${x(moment).toFixed(1)} ${top}V${bottom}`}));
  for (const line of lines) {
    for (const piece of pieces(line.points)) {
      const points = piece.map(point => [x(point[0]).toFixed(1), y(point[1]).toFixed(1)]);
      inside.append(s('polyline', {class: 'line ' + line.style, points: points.join(' ')}));
      // A single point between two breaks has no line.
      const r = line.dots ? 4 : points.length === 1 ? 1.5 : 0;
      if (r) for (const [cx, cy] of points) inside.append(s('circle', {class: 'point ' + line.style, cx, cy, r}));
    }
  }
  drawing.append(inside);
  fill(place, drawing);
}
function nice10(from) {
  const ten = 10 ** Math.floor(Math.log10(from));
  return [1, 2, 5, 10].map(step => step * ten).find(step => step >= from);
}
function drawLoss(run) {
  once($('loss-by'), 1, () => choices($('loss-by'), 'loss', [['over time', 0], ['over tokens', 1]], () => lossBy, value => { lossBy = value; }));
  once($('loss-range'), 1, () => choices($('loss-range'), 'range', [['last half', 0], ['all values', 1]], () => lossRange, value => { lossRange = value; }));
  const names = ['loss', ...Object.keys(run.metrics).filter(name => name !== 'loss')];
  if (!names.includes(metric)) metric = 'loss';
  once($('metric'), names, () => { fill($('metric'), ...names.map(name => h('option', {}, name))); $('metric').value = metric; });
  $('loss-by').hidden = $('loss-range').hidden = metric !== 'loss';
  const islands = metric === 'loss' ? run.curves.loss : run.metrics[metric], by = metric === 'loss' ? lossBy : 0;
  const lines = Object.entries(islands).sort((a, b) => a[0].length - b[0].length || (a[0] < b[0] ? -1 : 1)).map(([name, points], index) =>
    ({name, style: colour(index), points: points.map(point => [point[by], point[metric === 'loss' ? 2 : 1]])}));
  const mean = smoothed(lines);
  for (const line of lines) line.style += ' pale';
  if (mean.length) lines.push({name: `mean of the ${metric === 'evaluation loss' ? 'lines' : 'islands'}, smoothed`, style: 'main', points: mean});
  if (metric === 'loss' && run.curves.evals.length) lines.push({name: 'global model', style: 'main dashed', dots: true, points: run.curves.evals.map(point => [point[by], point[2]])});
  chart($('loss'), $('loss-legend'), lines, by ? short : tick, {label: metric, xTitle: by ? 'tokens of all islands' : SINCE,
    marks: by ? [] : marksOf(run), yTitle: metric.replaceAll('_', ' '), settles: metric === 'loss' && !lossRange});
}
function drawPace(run) {
  const {totals, trained, islands} = run.curves, one = (name, points, style = 'k0') => ({name, style, points});
  // Marks and axes are those of the losses, so that all charts show the same time.
  const about = {xTitle: SINCE, low: 0, marks: marksOf(run)};
  $('pace').hidden = totals.length < 2;
  if ($('pace').hidden) return;
  chart($('trained'), $('trained-legend'), [one('goodput', growth(trained, 1, 2).map(([t, part]) => [t, known(part) ? Math.min(1, part) : null]), 'k2')], tick,
    {...about, label: 'Goodput', yTitle: 'share of island-seconds', yForm: value => Math.round(100 * value) + '%'});
  chart($('speed'), $('speed-legend'), [one('tokens/s of all islands', growth(totals, 1))], tick,
    {...about, label: 'Tokens per second', yTitle: 'tokens/s', yForm: short});
  chart($('traffic'), $('traffic-legend'), [one('up', growth(totals, 2)), one('down', growth(totals, 3), 'k1')], tick,
    {...about, label: 'Bytes per second', yTitle: 'bytes/s of all islands', yForm: short});
  chart($('present'), $('present-legend'), Object.entries(islands).map(([name, points], index) => one(name, points, colour(index))), tick,
    {...about, label: 'Islands', yTitle: 'islands'});
}
