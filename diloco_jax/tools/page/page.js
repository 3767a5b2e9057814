// The page of one or several runs.
const token = location.hash.slice(1);
// The data of a report, which has no server; null on a served page.
const still = JSON.parse($('data').textContent);
const calm = matchMedia('(prefers-reduced-motion: reduce)');
let runs = [], shown = 0, moment = null, heardMs = 0, picked = null, span = 0, lossBy = 0, lossRange = 0, metric = 'loss';

// ---- what comes from the server
function take(kind, data) {
  heardMs = performance.now();
  if (kind === 'whole') runs = data.runs;
  else data.runs.forEach((news, index) => {
    const run = runs[index], last = run.events.length ? run.events[run.events.length - 1].n : 0;
    const rounds = new Map(run.rounds.map(round => [round.step, round]));
    for (const round of news.rounds) rounds.set(round.step, round);
    const events = [...run.events, ...news.events.filter(event => event.n > last)].slice(-300);
    Object.assign(run, news, {rounds: [...rounds.values()].sort((a, b) => a.step - b.step).slice(-240), events});
  });
  if (shown >= runs.length) shown = 0;
  draw();
}
function listen() {
  const source = new EventSource('events?token=' + encodeURIComponent(token));
  for (const kind of ['whole', 'news']) {
    source.addEventListener(kind, event => { text($('link'), ''); take(kind, JSON.parse(event.data)); });
  }
  source.onerror = () => {
    const refused = source.readyState === EventSource.CLOSED;
    text($('link'), refused ? 'refused: open the whole address that diloco view printed, with what follows the #'
      : 'connection lost; trying again. What is shown is old');
    if (refused && runs.length) setTimeout(listen, 5000);
  };
}

// ---- head
const STATES = {running: 'is-good', complete: 'is-good', evaluating: 'is-good', starting: 'is-new', stopped: 'is-warn'};
const CONDITIONS = {training: 'is-good', evaluating: 'is-good', joining: 'is-new', recovering: 'is-new', slow: 'is-warn',
  unmerged: 'is-warn', unanswered: 'is-warn', striking: 'is-warn', silent: 'is-warn', gone: 'is-bad', expelled: 'is-bad', banned: 'is-dim',
  left: 'is-dim'};
// Words of people for conditions, where they differ from those of the files (protocol/watch/health.py).
const SHOWN = {gone: 'disconnected'};
const live = run => !still && ['running', 'starting', 'evaluating'].includes(run.status.state);
function drawHead(run) {
  const {status, summary} = run, steps = status.global_step ?? summary.global_steps, total = status.total_steps;
  const {config, began_unix_s} = run.made || {}, parameters = summary.num_parameters ?? status.num_parameters;
  // Runs side by side may have one name, but not one folder.
  const name = runs.length < 2 && config || run.name;
  text($('name'), name);
  text($('state'), status.state || (run.read < 1 ? 'reading' : 'no status'));
  $('state').className = 'chip ' + (STATES[status.state] || (run.read < 1 ? 'is-new' : 'is-bad'));
  document.title = name + ': ' + (status.state || '') + (total ? ' ' + Math.floor(100 * steps / total) + '%' : '');
  $('progress').value = total ? Math.min(1, steps / total) : 0;
  const left = status.state === 'running' && known(status.left_s) ? ', about ' + time(status.left_s) + ' left' : '';
  const read = run.read < 1 ? ', reading its records: ' + share(run.read) : '';
  const partial = still && !summary.complete ? '. Not complete: the numbers are those up to the last record' : '';
  text($('origin'), [run.name === name ? '' : 'folder ' + run.name, config && config !== name ? 'config ' + config : '', known(parameters) ? si(parameters) + ' parameters' : '',
    known(began_unix_s) ? 'started ' + date(began_unix_s) : ''].filter(Boolean).join(', '));
  text($('facts'), `step ${run.progress.join(', ')}${left}${read}${partial}`);
  if (still) text($('link'), 'a report' + (known(run.written_unix_s) ? ', written ' + date(run.written_unix_s) : ''));
  text($('verdict'), still ? run.verdict : '');
  text($('waiting'), live(run) && status.waiting_for ? 'waiting for: ' + status.waiting_for : '');
  const choice = $('choice');
  choice.hidden = runs.length < 2;
  once(choice, runs.map(each => each.name), () => choices(choice, 'run', runs.map((each, index) => [each.name, index]),
    () => shown, value => { shown = value; picked = null; }));
}
function choices(place, name, options, now, choose) {
  place.querySelectorAll('label').forEach(label => label.remove());
  for (const [words, value] of options) {
    const input = h('input', {type: 'radio', name, value, onchange: () => { choose(value); draw(); }});
    input.checked = value === now();
    place.append(h('label', {}, input, h('span', {}, words)));
  }
}
const ENDED_OPEN = 4;
function drawAlarms(run) {
  once($('alarm-list'), run.alarms, () => fill($('alarm-list'), ...(run.alarms.length
    ? run.alarms.map(alarm => h('li', {}, alarm.text, h('span', {}, alarm.remedy)))
    : [h('li', {class: 'none'}, live(run) ? 'None now' : 'None at the end')])));
  once($('ended-list'), run.ended, () => {
    $('ended').hidden = !run.ended.length;
    // A long list of the past must not hide the losses of a run that has ended.
    if (!live(run)) $('ended').open = run.ended.length <= ENDED_OPEN;
    text($('ended-what'), `Ended: ${run.ended.length}`);
    fill($('ended-list'), ...[...run.ended].reverse().map(alarm => h('li', {}, ended(alarm))));
  });
}
function ended(alarm) {
  const when = `from ${time(alarm.from_s)} to ${time(alarm.until_s)} of the run`;
  return `${alarm.past ?? alarm.text} for ${time(alarm.lasted_s)}, `
    + (alarm.times > 1 ? `in all, ${alarm.times} times, most recently ${when}` : when);
}
function drawFigures(run) {
  fill($('figures'), ...run.figures.filter(figure => known(figure.value)).map(figure =>
    h('div', {}, h('dt', {}, figure.words), h('dd', {}, figure.text))));
}

// ---- islands: rows stay, so that focus on their buttons does
// Pairs of a header and a function that writes the cell of an island.
function columnsOf(run) {
  const condition = row => row.finished ? 'finished' : (SHOWN[row.condition] || row.condition) + (row.condition === 'training' || !known(row.since_s) ? '' : ' for ' + time(row.since_s));
  const mean = row => row.mean_tokens_per_s ? si(row.mean_tokens_per_s) + ' on average' : '';
  const figures = run.columns.map(({name, words}) => [words, row =>
    name === 'tokens_per_s' && row.finished ? mean(row) : (run.islands[row.learner] || {})[name] || none]);
  return [['condition', condition], ...figures, ['reason', row => row.finished ? '' : row.reason || '']];
}
function drawIslands(run) {
  const rows = (run.status.learners || []).length ? run.status.learners
    : Object.entries(run.summary.learners).map(([learner, row]) => ({learner, condition: run.summary.complete ? 'finished' : 'left', ...row}));
  // Statuses of older versions do not have the key.
  for (const row of rows) row.finished ??= row.condition === 'finished' || (run.status.state === 'complete' && row.condition === 'left' && row.since_s <= 5);
  const columns = columnsOf(run), table = $('island-table'), names = rows.map(row => row.learner);
  once(table, [run.name, names, run.logs], () => {
    fill(table.tHead, h('tr', {role: 'row'}, ...['island', ...columns.map(column => column[0]), ...(still ? [] : ['actions'])].map(name =>
      h('th', {scope: 'col', role: 'columnheader', class: name === 'reason' ? 'text' : null}, name))));
    fill(table.tBodies[0], ...rows.map(row => h('tr', {role: 'row'},
      h('th', {scope: 'row', role: 'rowheader'}, row.learner),
      ...columns.map(([name]) => h('td', {role: 'cell', 'data-label': name === 'condition' ? null : name,
        class: name === 'reason' ? 'word' : null})),
      still ? null : h('td', {role: 'cell'}, run.logs.includes(row.learner)
        ? h('button', {'aria-label': 'Log of ' + row.learner, onclick: () => readLog(row.learner, true)}, 'Log') : null,
      h('button', {class: 'drain', 'aria-label': 'Let ' + row.learner + ' leave', onclick: () => drain(row.learner)}, 'Drain')))));
    if (!rows.length) fill(table.tBodies[0], h('tr', {}, h('td', {class: 'text'}, 'No island has connected yet.')));
  });
  rows.forEach((row, index) => {
    const cells = table.tBodies[0].rows[index].cells;
    columns.forEach(([name, form], column) => {
      const cell = cells[column + 1], words = form(row);
      if (name !== 'condition') return text(cell, words);
      once(cell, words, () => fill(cell, h('span', {class: 'dot ' + (row.finished ? 'is-good' : CONDITIONS[row.condition] || ''), 'aria-hidden': 'true'}), words));
    });
    const button = cells[cells.length - 1].querySelector('.drain');
    if (button) button.disabled = !live(run) || ['gone', 'left', 'expelled', 'banned'].includes(row.condition);
  });
}
async function drain(learner) {
  const dialog = $('ask');
  text($('ask-h'), `Let ${learner} leave?`);
  dialog.returnValue = 'no';
  dialog.showModal();
  await new Promise(done => dialog.addEventListener('close', done, {once: true}));
  if (dialog.returnValue !== 'yes') return;
  text($('drained'), `asking the syncer about ${learner} …`);
  try {
    const answer = await fetch('drain', {method: 'POST', headers: {'X-Token': token},
      body: JSON.stringify({run: shown, learner})});
    text($('drained'), answer.headers.get('Content-Type').includes('json') ? (await answer.json()).message : await answer.text());
  } catch (error) { text($('drained'), 'no answer: ' + error.message); }
}

// ---- rounds
const PHASES = [['quorum', 'opened_s', 'met_s'], ['grace', 'met_s', 'closed_s'], ['pulls', 'closed_s', 'pulled_s'],
  ['merge', 'pulled_s', 'merged_s'], ['broadcast', 'merged_s', 'heard_s']];
// Adds the time when the last island had the new version.
function timed(round) {
  const took = Object.values(round.arrived);
  return {...round, heard_s: took.length && round.merged_s && round.state === 'merged' ? round.merged_s + Math.max(...took) : undefined};
}
const begin = round => round.opened_s ?? round.closed_s ?? round.merged_s;
const end = (round, now) => round.heard_s ?? round.merged_s ?? now;
const slowest = values => Object.entries(values || {}).reduce((a, b) => !a || b[1] > a[1] ? b : a, null);
function describe(round) {
  const parts = PHASES.filter(([, a, b]) => known(round[a]) && known(round[b])).map(([name, a, b]) => name + ' ' + time(round[b] - round[a]));
  const late = Object.entries(round.late).map(([name, by]) => `${name} by ${time(by)}`), last = slowest(round.values), far = slowest(round.arrived);
  return `Round ${round.step}, fragment ${round.fragment}, ${round.state}: ${parts.join(', ') || 'no times recorded'}. `
    + (round.reason ? `Closed: ${round.reason}. ` : '') + `Members: ${(round.merged || round.members).join(', ') || 'none'}. `
    + (last && Object.keys(round.values).length > 1 ? `Last value: ${last[0]}, ${time(last[1])} after closing. ` : '')
    + (far ? `Last to have the new version: ${far[0]}, after ${time(far[1])}. ` : '')
    + (late.length ? `Late: ${late.join(', ')}.` : 'Nobody was late.');
}
function lanes(rounds, now) {
  const free = [];
  return rounds.map(round => {
    let lane = free.findIndex(at => at <= begin(round));
    if (lane < 0) lane = free.length;
    free[lane] = end(round, now);
    return lane;
  });
}
// The label of a round time on an axis.
const tick = t => t < 60 ? +t.toFixed(1) + ' s' : t < 3600 && t % 60 === 0 ? t / 60 + ' min'
  : t < 86400 && t % 3600 === 0 ? t / 3600 + ' h' : time(t);
const nice = (from, most) => [0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 86400, 604800].find(step => from / step <= most) || from;
// The last broadcasts of a run wait for the final evaluation, so the timeline of a run without rounds to come ends soon
// after its last merge.
const tail = (last, run) => known(last.merged_s) ? last.merged_s + (run.round_s || 1) : Infinity;
const merging = run => live(run) && run.status.state !== 'evaluating';
// Kinds of events that charts over time mark.
const MARKED = ['left', 'disconnected', 'joined', 'silent', 'restarted', 'expelled', 'banned', 'admitted'];
const SINCE = 'time since the start of the run';
// What charts over time mark: those events, and injected faults with their numbers.
const marksOf = run => [...run.events.filter(event => MARKED.includes(event.kind)),
  ...(run.faults || []).map(fault => ({t: fault.t, kind: 'fault', who: [], label: String(fault.n), what: `fault ${fault.n}: ${fault.what}`}))];
// The part of the timeline that moves.
let scene = null;
function drawRounds(run) {
  const rounds = run.rounds.map(timed).filter(round => known(begin(round))), box = $('timeline');
  const last = rounds[rounds.length - 1], now = merging(run) ? run.end_s : last ? Math.min(end(last, run.end_s), tail(last, run)) : 0;
  const auto = Math.max(2, 40 * (run.round_s || 1)), seconds = span || auto;
  once($('phases'), 1, () => fill($('phases'), ...PHASES.map(([name], index) =>
    h('li', {}, s('svg', {viewBox: '0 0 10 10', 'aria-hidden': 'true'}, s('rect', {class: 'ph' + index, width: 10, height: 10})), name))));
  once($('spans'), 1, () => choices($('spans'), 'span', [['40 rounds', 0], ['15 s', 15], ['1 min', 60], ['5 min', 300], ['1 h', 3600]],
    () => span, value => { span = value; }));
  const chosen = rounds.find(round => round.step === picked), right = chosen && end(chosen, now) < now - seconds ? end(chosen, now) + seconds / 4 : now;
  const width = Math.max(240, box.clientWidth), lane = lanes(rounds, now), shownRounds = rounds.filter(round => end(round, now) > right - seconds * 1.05);
  const used = shownRounds.map(round => lane[rounds.indexOf(round)]), count = Math.max(3, ...used.map(each => each + 1));
  const row = count > 12 ? 14 : 22, height = count * row, x = t => (t - right + seconds) / seconds * width;
  const moving = s('g');
  for (let t = Math.max(0, Math.ceil((right - seconds) / nice(seconds, width / 90))) * nice(seconds, width / 90); t < right + seconds / 20; t += nice(seconds, width / 90)) {
    const label = tick(t);
    moving.append(s('path', {class: 'grid', d: `M${x(t)} 0V${height}`}));
    // A text that does not move into view would stay cut off.
    if (merging(run) || x(t) + 3 + 6.5 * label.length <= width) moving.append(s('text', {x: x(t) + 3, y: height + 14}, label));
  }
  shownRounds.forEach((round, index) => {
    const y = used[index] * row + 2, tall = row - 4, group = s('g', {class: 'round'});
    const whole = {x: x(begin(round)), y, width: Math.max(1.5, x(end(round, now)) - x(begin(round))), height: tall, rx: 2};
    group.append(s('rect', {...whole, class: round.state === 'abandoned' ? 'lost' : 'track'}));
    PHASES.forEach(([, a, b], phase) => {
      if (!known(round[a])) return;
      const stop = round[b] ?? (round.state === 'closed' && phase < 4 && !PHASES.slice(phase + 1).some(p => known(round[p[2]])) ? now : round[a]);
      if (stop > round[a] && round.state !== 'abandoned') group.append(s('rect', {class: 'ph' + phase, x: x(round[a]), y, width: x(stop) - x(round[a]), height: tall}));
    });
    if (!known(round.opened_s) && round.state === 'merged') group.append(s('rect', {...whole, class: 'ph2'}));
    if (whole.width > 34 && tall > 14) group.append(s('text', {class: 'inside', x: whole.x + 5, y: y + tall - 5}, `${round.step}`));
    for (const by of Object.values(round.late)) {
      const at = x(round.closed_s + by);
      if (at <= x(right)) group.append(s('path', {class: 'late', d: `M${at} ${y + tall / 2 - 5}l5 5l-5 5l-5 -5z`}));
    }
    if (round.step === picked) group.append(s('rect', {...whole, class: 'picked'}));
    group.addEventListener('click', () => pick(round.step));
    moving.append(group);
  });
  for (const event of run.events) {
    if (!MARKED.includes(event.kind) || event.t < right - seconds || event.t > right) continue;
    moving.append(s('path', {class: 'mark' + (event.kind === 'joined' ? ' good' : ''), d: `M${x(event.t)} 0V${height}`},
      s('title', {}, `${event.who.join(', ')} ${event.kind}`)));
  }
  fill(box, s('svg', {width, height: height + 36, viewBox: `0 0 ${width} ${height + 36}`, 'aria-hidden': 'true'}, moving,
    s('text', {class: 'axis-title', x: width / 2, y: height + 31, 'text-anchor': 'middle'}, SINCE)));
  scene = merging(run) && right === now ? {moving, perS: width / seconds} : null;
  const told = rounds.find(round => round.step === picked) || [...rounds].reverse().find(round => round.merged_s);
  if (picked !== null || !live(run)) text($('picked'), told ? describe(told) : 'No round has closed yet.');
  else text($('picked'), rounds.length ? 'Choose a round to see its times.' : 'No round has closed yet.');
  if ($('round-table').closest('details').open) drawRoundTable(rounds);
}
function drawRoundTable(rounds) {
  const newest = [...rounds].reverse().slice(0, 60), cell = words => h('td', {}, words);
  fill($('round-table'), h('thead', {}, h('tr', {}, ...['round', 'fragment', ...PHASES.map(phase => phase[0]), 'last value', 'members', 'late'].map(name => h('th', {scope: 'col'}, name)))),
    h('tbody', {}, ...newest.map(round => h('tr', {}, h('th', {scope: 'row'}, String(round.step)), cell(String(round.fragment)),
      ...PHASES.map(([, a, b]) => cell(known(round[a]) && known(round[b]) ? time(round[b] - round[a]) : none)),
      cell(slowest(round.values) ? slowest(round.values)[0] : none), cell(String((round.merged || round.members).length)),
      cell(Object.entries(round.late).map(([name, by]) => `${name} ${time(by)}`).join(', ') || none)))));
}
function pick(step) { picked = step; drawRounds(runs[shown]); }
$('timeline').addEventListener('keydown', event => {
  const steps = (runs[shown]?.rounds || []).map(round => round.step), at = steps.indexOf(picked);
  const to = {ArrowLeft: at < 0 ? steps.length - 1 : at - 1, ArrowRight: at < 0 ? steps.length - 1 : at + 1, Home: 0, End: steps.length - 1}[event.key];
  if (event.key === 'Escape') pick(null);
  else if (to !== undefined && steps.length) { event.preventDefault(); pick(steps[Math.max(0, Math.min(steps.length - 1, to))]); }
});
// Moves the timeline between two news.
function move() {
  if (scene && !calm.matches && !document.hidden) {
    scene.moving.setAttribute('transform', `translate(${-scene.perS * Math.min(3, (performance.now() - heardMs) / 1000)} 0)`);
  }
  setTimeout(() => requestAnimationFrame(move), 60);
}

function drawStrip(run) {
  const {cells, members} = run.curves, names = Object.keys(members), box = $('strip'), width = Math.max(240, box.clientWidth);
  once(box, [run.name, cells, members, width, run.events.length, moment], () => {
    if (!names.length) return fill(box, h('p', {class: 'soft'}, 'No round has been merged yet.'));
    const left = Math.min(110, 16 + 7 * Math.max(...names.map(name => name.length))), row = names.length > 16 ? 12 : 18, height = names.length * row;
    const end = Math.max(run.end_s, cells[cells.length - 1][1]) || 1, x = t => left + t / end * (width - left), step = nice(end, width / 90);
    const words = names.map(name => `${name} in ${share(members[name].reduce((a, b) => a + b) / cells.reduce((a, cell) => a + cell[2], 0))}`);
    const drawing = s('svg', {width, height: height + 34, viewBox: `0 0 ${width} ${height + 34}`, role: 'img', 'aria-label': 'Rounds and their members: ' + words.join(', ')});
    for (let t = 0; t <= end * 0.93; t += step) drawing.append(s('text', {x: x(t), y: height + 14}, tick(t)));
    drawing.append(s('text', {class: 'axis-title', x: (left + width) / 2, y: height + 29, 'text-anchor': 'middle'}, SINCE));
    names.forEach((name, index) => {
      drawing.append(s('text', {class: 'row-name', x: 0, y: (index + 0.75) * row}, name.length > 14 ? name.slice(0, 13) + '…' : name),
        s('rect', {class: 'track', x: left, y: index * row + 1, width: width - left, height: row - 2}));
      members[name].forEach((hits, at) => {
        const [from, to] = cells[at];
        if (hits) drawing.append(s('rect', {class: 'cell', x: x(from), y: index * row + 1, width: Math.max(1, x(to) - x(from)), height: row - 2, opacity: 0.12 + 0.88 * hits / cells[at][2]}));
      });
      if (moment !== null) drawing.append(s('path', {class: 'cross', d: `M${x(moment)} ${index * row}v${row}`}));
      for (const event of run.events) {
        if (MARKED.includes(event.kind) && event.who.includes(name)) {
          drawing.append(s('path', {class: 'mark' + (event.kind === 'joined' ? ' good' : ''), d: `M${x(event.t)} ${index * row}v${row}`}, s('title', {}, `${name} ${event.kind}: ${event.reason}`)));
        }
      }
    });
    fill(box, drawing);
  });
}

// ---- a moment of a finished run, and the faults that were injected into it
const CONNECTION = {joined: '', back: '', left: 'has left', disconnected: 'is disconnected', silent: 'is silent', expelled: 'is expelled',
  banned: 'is banned', admitted: 'is disconnected'};
function describeMoment(run, t) {
  const state = {}, complete = run.events.length && run.events[0].n === 1;
  for (const event of run.events) {
    if (event.t > t) break;
    // An expelled or banned island is disconnected too, which says less.
    if (event.reason === 'expelled' || event.reason === 'banned') continue;
    const now = CONNECTION[event.kind];
    if (now !== undefined) for (const name of event.who) state[name] = now;
  }
  const away = Object.entries(state).filter(each => each[1]).map(each => each.join(' ')), parts = [];
  const loss = pointAt(smoothed(Object.values(run.curves.loss).map(points => ({points: points.map(point => [point[0], point[2]])}))), t);
  const merged = pointAt((run.curves.islands || {})['merged per round'] || [], t);
  const under = (run.faults || []).filter(fault => fault.t <= t && t <= (fault.recovered_s ?? fault.t) + 1);
  if (under.some(fault => fault.what.includes('-syncer'))) parts.push('the syncer is away, so no round closes, and islands train on');
  else {
    if (away.length) parts.push(away.join(', '));
    // Without the oldest events the state of some islands is unknown.
    else if (complete) parts.push('all islands are connected');
    if (merged) parts.push(`rounds merge ${merged[1].toFixed(1)} islands`);
  }
  if (loss) parts.push(`training loss ${loss[1].toFixed(3)}`);
  for (const fault of under) parts.push(`fault ${fault.n} (${fault.what}) for ${time(t - fault.t)}`);
  return `${time(t)}: ${parts.join('; ')}`;
}
function drawMoment(run) {
  const faults = run.faults || [];
  $('moments').hidden = live(run) || lossBy !== 0 || !run.end_s;
  text($('moment-what'), moment === null ? '' : describeMoment(run, moment));
  $('faults').hidden = !faults.length;
  once($('fault-table'), [run.name, faults, live(run)], () => fill($('fault-table'),
    h('thead', {}, h('tr', {}, ...['fault', 'time', 'what', 'start to recovery'].map((name, at) => h('th', {scope: 'col', class: at === 2 ? 'text' : null}, name)))),
    h('tbody', {}, ...faults.map(fault => h('tr', {}, h('th', {scope: 'row'}, String(fault.n)),
      h('td', {}, !live(run) ? h('button', {'aria-label': `Show the charts at fault ${fault.n}`, onclick: () => show(fault.t + 0.5)}, time(fault.t)) : time(fault.t)),
      h('td', {class: 'text'}, fault.what), h('td', {}, known(fault.recovered_s) ? time(fault.recovered_s - fault.t) : none))))));
}
function show(t) {
  moment = Math.min(t, runs[shown].end_s);
  $('moment').value = 1000 * moment / runs[shown].end_s;
  draw();
}
$('moment').addEventListener('input', event => show(event.target.value / 1000 * runs[shown].end_s));
// Reads the metrics again, because news do not have them.
async function refresh() {
  if (metric === 'loss' || still || document.hidden || !runs.length || !live(runs[shown])) return;
  const answer = await fetch('state?token=' + encodeURIComponent(token)).catch(() => null);
  if (answer?.ok) (await answer.json()).runs.forEach((run, index) => { runs[index].metrics = run.metrics; });
}
setInterval(refresh, 10000);
$('metric').addEventListener('change', event => { metric = event.target.value; draw(); });

// ---- tables of shares
const USES = [['stopped', 'stopped', ': the run had no process'], ['away', 'disconnected or silent', ''], ['joining', 'joining', ': load, compile, recover a state'],
  ['between', 'between steps', ''], ['data', 'waiting for data', ''], ['training', 'training', ': goodput']];
function bar(from, to, style, label) {
  return h('td', {class: 'bar'}, s('svg', {viewBox: '0 0 100 10', preserveAspectRatio: 'none', role: 'img', 'aria-label': label},
    s('rect', {class: 'track', width: 100, height: 10}), s('rect', {class: style, x: 100 * from, width: Math.max(0, 100 * (to - from)), height: 10})));
}
function drawUses(run) {
  const islands = Object.entries(run.times.islands), sum = use => islands.reduce((all, [, row]) => all + row[use], 0);
  const total = USES.reduce((all, [use]) => all + sum(use), 0);
  let top = 1;
  fill($('waterfall'), h('tbody', {}, ...(total ? USES : []).map(([use, words, more]) => {
    const part = sum(use) / total, from = use === 'training' ? 0 : top - part;
    top -= part;
    return h('tr', {}, h('th', {scope: 'row'}, words, h('span', {}, more)), bar(from, from + part, 'use-' + use, run.times.shares[use]), h('td', {}, run.times.shares[use]), h('td', {class: 'soft'}, time(sum(use))));
  })));
  fill($('uses'), h('thead', {}, h('tr', {}, ...['island', ...USES.map(([, words]) => words)].map(name => h('th', {scope: 'col'}, name)))),
    h('tbody', {}, ...islands.map(([name, row]) => h('tr', {}, h('th', {scope: 'row'}, name), ...USES.map(([use]) => h('td', {}, time(row[use])))))));
}
function drawLinks(run) {
  const {status, summary, plan, rate, config} = run, rows = [], steps = Object.values(summary.learners).reduce((all, row) => all + row.local_steps, 0);
  const wire = status.wire || summary.wire, bytes = value => si(value, 'B');
  for (const [name, way] of [['up', 'up'], ['down', 'down']]) {
    const planned = plan[way + '_bytes_per_step'], measured = steps && known(wire[way + '_bytes']) ? wire[way + '_bytes'] / steps : null;
    rows.push([name, known(measured) ? bytes(measured) : none, planned ? bytes(planned) : none,
      planned && known(measured) ? (measured / planned).toFixed(2) + ' times' : none, rate ? si(rate[way + '_per_s'], 'B/s') : none]);
  }
  const steady = (status.learners || []).filter(row => row.step_s && row.state === 'active').map(row => row.step_s), tau = config.overlap_steps;
  const slack = steady.length && tau ? tau * Math.min(...steady) : null, took = run.rounds.map(timed).filter(round => round.heard_s && known(round.closed_s));
  const mean = took.length ? took.reduce((all, round) => all + round.heard_s - round.closed_s, 0) / took.length : null;
  const parallel = summary.wire.data_parallel_bytes, moved = (wire.up_bytes || 0) + (wire.down_bytes || 0);
  text($('links-note'), 'Bytes that an island moves per inner step, all control messages included, against the payloads that its config plans. '
    + (mean !== null ? `From closing a round until all have its result: ${time(mean)} on average` + (slack ? `; ${tau} inner steps, which it may take, are ${time(slack)}. ` : '. ') : '')
    + (parallel && moved ? `Averaging bfloat16 gradients in every step would have moved ${si(parallel, 'B')}, ${si(parallel / moved)} times as much.` : ''));
  fill($('links'), h('thead', {}, h('tr', {}, ...['way', 'bytes per step', 'planned', 'measured / planned', 'all islands, last minute'].map(name => h('th', {scope: 'col'}, name)))),
    h('tbody', {}, ...rows.map(([name, ...cells]) => h('tr', {}, h('th', {scope: 'row'}, name), ...cells.map(words => h('td', {}, words))))));
}
const FATES = [['merged', 'use-training'], ['overwritten', 'use-joining'], ['released', 'use-between'], ['out', 'track']];
function drawSamples(run) {
  const fates = run.summary.samples, all = fates ? fates.leased : 0;
  fill($('samples'), h('tbody', {}, ...(all ? FATES.map(([name, style]) => h('tr', {}, h('th', {scope: 'row'},
    {merged: 'merged', overwritten: 'overwritten on adoption', released: 'given to others', out: 'still leased, now or when the run ended'}[name]),
    bar(0, fates[name] / all, style === 'track' ? 'ph0' : style, share(fates[name] / all)), h('td', {}, share(fates[name] / all)), h('td', {class: 'soft'}, si(fates[name])))) : [h('tr', {}, h('td', {class: 'text'}, 'Not known yet.'))])));
}
function drawEvents(run) {
  once($('events'), [run.name, run.events.length && run.events[run.events.length - 1].n], () => fill($('events'), ...[...run.events].reverse().map(event =>
    h('li', {}, h('time', {}, time(event.t)), ' ', h('b', {}, event.who.join(', ') + ' ' + event.kind), event.reason ? ': ' + event.reason : ''))));
  const earlier = run.events.length ? run.events[0].n - 1 : 0;
  text($('events-earlier'), earlier ? `The newest ${run.events.length} of ${run.events.length + earlier} events.` : '');
}
function drawSample(run) {
  $('sample').hidden = !run.sample;
  text($('sample-text'), run.sample || '');
}

// ---- runs side by side
function drawRuns() {
  $('runs').hidden = runs.length < 2;
  if (runs.length < 2) return;
  const head = () => h('thead', {}, h('tr', {}, h('th', {scope: 'col'}, ''), ...runs.map(run => h('th', {scope: 'col'}, run.name))));
  const row = (name, cells) => h('tr', {}, h('th', {scope: 'row'}, name), ...cells.map(words => h('td', {}, words)));
  fill($('runs-table'), head(), h('tbody', {}, 
    row('state', runs.map(run => run.status.state || none)),
    row('progress', runs.map(run => run.status.total_steps ? share(Math.min(1, run.status.global_step / run.status.total_steps)) : none)),
    ...runs[0].compared.map(({words}, at) => row(words, runs.map(run => run.compared[at].text))),
    row('alarms', runs.map(run => String(run.alarms.length)))));
  chart($('runs-chart'), $('runs-legend'), runs.map((run, index) => {
    const evals = run.curves.evals, points = evals.length > 1 ? evals : Object.values(run.curves.loss)[0] || [];
    return {name: run.name + (evals.length > 1 ? '' : ' (training)'), style: colour(index), points: points.map(point => [point[1], point[2]])};
  }), short, {label: 'Loss over tokens', xTitle: 'tokens of all islands', yTitle: 'loss', settles: true});
}

function drawMade(run) {
  const {versions = {}, host, again} = run.made || {}, rows = Object.entries(versions);
  if (host) rows.push(['machine of the syncer', host]);
  if (known(run.made?.began_unix_s)) rows.push(['started', date(run.made.began_unix_s)]);
  rows.push(['run it again with', again]);
  once($('made'), [run.name, rows], () => fill($('made'), ...rows.map(([name, words]) => h('div', {}, h('dt', {}, name), h('dd', {}, words)))));
}
function drawSettings() {
  once($('settings'), runs.map(run => run.settings), () => {
    const names = [...new Set(runs.flatMap(run => Object.keys(run.settings)))], words = (run, name) => name in run.settings ? JSON.stringify(run.settings[name]) : none;
    const told = runs.length < 2 ? names : names.filter(name => new Set(runs.map(run => words(run, name))).size > 1);
    text($('settings-what'), runs.length < 2 ? `All ${told.length} settings` : `The ${told.length} settings in which the runs differ`);
    fill($('settings'), h('thead', {}, h('tr', {}, h('th', {scope: 'col'}, 'setting'), ...runs.map(run => h('th', {scope: 'col'}, run.name)))),
      h('tbody', {}, ...told.map(name => h('tr', {}, h('th', {scope: 'row'}, name), ...runs.map(run => h('td', {class: 'text'}, words(run, name)))))));
  });
}

// ---- logs
let following = null;
async function readLog(name, go) {
  if (name) $('log-name').value = name;
  if (go) { $('logs').scrollIntoView({behavior: calm.matches ? 'auto' : 'smooth'}); $('log').focus({preventScroll: true}); }
  const place = $('log'), atEnd = place.scrollTop + place.clientHeight >= place.scrollHeight - 8;
  const query = new URLSearchParams({run: shown, name: $('log-name').value, token});
  try {
    text(place, await (await fetch('log?' + query)).text() || '(empty)');
    if (go || atEnd) place.scrollTop = place.scrollHeight;
  } catch (error) { text(place, 'no answer: ' + error.message); }
}
$('log-get').addEventListener('click', () => readLog('', true));
$('log-name').addEventListener('change', () => readLog(''));
$('log-follow').addEventListener('change', event => {
  clearInterval(following);
  if (event.target.checked) { readLog('', true); following = setInterval(readLog, 2000, ''); }
});
function drawLogs(run) {
  once($('log-name'), [run.name, run.logs], () => {
    const before = $('log-name').value;
    fill($('log-name'), ...run.logs.map(name => h('option', {}, name)));
    if (run.logs.includes(before)) $('log-name').value = before;
  });
  $('logs').hidden = !run.logs.length;
}

// ---- everything
function draw() {
  const run = runs[shown];
  if (!run) return;
  document.querySelector('main').classList.toggle('empty', !run.end_s);
  for (const part of [drawHead, drawAlarms, drawFigures, drawRuns, drawLoss, drawMoment, drawPace, drawIslands, drawRounds, drawStrip, drawUses, drawLinks, drawSamples, drawSample, drawEvents, drawLogs, drawMade, drawSettings]) part(run);
}
document.querySelector('.skip').addEventListener('click', event => { event.preventDefault(); $('islands').focus(); });
document.querySelectorAll('details').forEach(each => each.addEventListener('toggle', draw));
let resizing = 0;
addEventListener('resize', () => { clearTimeout(resizing); resizing = setTimeout(draw, 100); });
if (still) take('whole', still);
else listen();
move();
