"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const narrow = matchMedia("(max-width: 40rem)");
  const touch = matchMedia("(pointer: coarse)");
  const dashes = ["solid", "dash", "dashdot", "dot"];
  const font = { family: "system-ui, sans-serif", size: 13 };
  const pen = document.createElement("canvas").getContext("2d");
  pen.font = `${font.size}px ${font.family}`;

  // Okabe and Ito's colours, which colour-blind readers can tell apart; black becomes white in the dark.
  const colours = () => ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", dark.matches ? "#FFFFFF" : "#000000", "#999999"];
  const colour = (index) => colours()[index % 8];
  const faint = (hex) => hex + "26";
  const variable = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const by = (id) => document.getElementById(id);
  const chosen = (id) => by(id)?.value;

  function layout(x, y, more = {}) {
    const axis = { gridcolor: variable("--line"), zerolinecolor: variable("--line"), linecolor: variable("--line") };
    return {
      font: { ...font, color: variable("--ink") },
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      margin: { l: 64, r: 12, b: 48 },
      xaxis: { ...axis, title: { text: x } },
      yaxis: { ...axis, title: { text: y } },
      hovermode: narrow.matches ? "closest" : "x unified",
      hoverlabel: { bgcolor: variable("--paper"), font: { color: variable("--ink") } },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: variable("--soft"), activecolor: variable("--ink") },
      dragmode: touch.matches ? false : "zoom", // a finger scrolls the page; the toolbar has zoom
      ...more,
    };
  }

  // Left alone, plotly shows a single value on a scale of its own, up to one more and one less.
  const around = (value) => (value === 0 ? [-1, 1] : [Math.min(0, 2 * value), Math.max(0, 2 * value)]);

  // Columns as wide as the longest name, and as many lines as that takes on this screen.
  function legend(names, width) {
    const entry = Math.min(width - 60, Math.ceil(Math.max(...names.map((name) => pen.measureText(name).width))) + 8);
    const columns = Math.max(1, Math.floor(width / (entry + 45)));
    return { entry, lines: Math.ceil(names.length / columns) };
  }

  // `kind` says what is drawn: while it stays the same, so do zoom and hidden lines.
  function draw(id, traces, made, text, kind) {
    const place = by(id);
    if (!place) return;
    const known = traces.some((trace) => (trace.y || trace.z || []).flat().some((value) => value !== null));
    place.parentElement.hidden = !known;
    if (!known) return;
    place.setAttribute("role", "img");
    place.setAttribute("aria-label", text);
    by(id + "-text").textContent = text;
    const names = traces.filter((trace) => trace.name && trace.showlegend !== false).map((trace) => trace.name);
    let below = 0;
    if (names.length > 1 || made.showlegend) {
      const { entry, lines } = legend(names, place.clientWidth - made.margin.l - made.margin.r);
      below = 25 * lines + 12;
      made.legend = { orientation: "h", x: 0, xref: "container", xanchor: "left", y: 0, yref: "container", yanchor: "bottom", entrywidth: entry, tracegroupgap: 5, maxheight: below };
    }
    place.style.height = `${400 + below}px`;
    // Above the plot is the toolbar's place, so that it never lies on a curve.
    made.margin = { ...made.margin, t: 36, b: 48 + below, autoexpand: false };
    made.uirevision = kind;
    const values = traces.flatMap((trace) => (trace.z ? [] : trace.y)).filter((value) => value !== null);
    if (values.length && values.every((value) => value === values[0])) made.yaxis = { ...made.yaxis, range: around(values[0]) };
    // Few rounds, and plotly would write 1.5 between the first and the second.
    if (made.xaxis.title.text === data.progress.rounds && traces.every((trace) => Math.max(...trace.x) <= 10)) made.xaxis = { ...made.xaxis, dtick: 1 };
    Plotly.react(place, traces, made, {
      responsive: true, displaylogo: false, showSendToCloud: false, // nothing leaves this machine
      displayModeBar: touch.matches ? true : "hover", modeBarButtonsToRemove: ["select2d", "lasso2d"],
    });
  }

  // A line over seeds with its standard deviation as a band; a click on the legend hides both.
  function lines(group, figure, progress) {
    const traces = [];
    group.series.forEach((series, index) => {
      const x = series.progress[progress];
      if (!x) return;
      const at = series[figure].map((value, i) => (value === null ? -1 : i)).filter((i) => i >= 0);
      const y = at.map((i) => series[figure][i]);
      const std = at.map((i) => series[figure + "_std"][i]);
      const xs = at.map((i) => x[i]);
      if (!y.length) return;
      const style = { color: colour(index), width: series.name.startsWith("FedAgg") ? 3 : 2, dash: dashes[Math.floor(index / 8) % 4] };
      const mode = y.length > 1 ? "lines" : "markers";
      traces.push({ x: xs, y, uid: series.uid, name: series.name, legendgroup: series.name, mode, line: style, marker: { color: style.color } });
      if (std.every((value) => value !== null)) {
        traces.push({
          x: [...xs, ...xs.toReversed()],
          y: [...y.map((value, i) => value + std[i]), ...y.map((value, i) => value - std[i]).toReversed()],
          fill: "toself", fillcolor: faint(style.color), line: { width: 0 }, mode: "lines", uid: series.uid + " ±",
          legendgroup: series.name, showlegend: false, hoverinfo: "skip", name: series.name + " ± std",
        });
      }
    });
    return traces;
  }

  function drawCurves() {
    fill("group", data.groups.map((group) => group.name));
    fill("progress", Object.values(data.progress), Object.keys(data.progress));
    const group = data.groups[Number(chosen("group"))];
    const progress = chosen("progress");
    if (!group) return;
    for (const [figure, label] of Object.entries(group.names)) {
      draw("chart-" + figure, lines(group, figure, progress), layout(data.progress[progress], label), group.texts[figure], group.name + progress);
    }
  }

  // What all curves show, a row for every round of every line.
  function numbers() {
    return data.groups.flatMap((group) => group.series.flatMap((series) => series.accuracy.map((_, i) => ({
      setting: group.name, method: series.name, seeds: series.seeds,
      ...Object.fromEntries(Object.keys(data.progress).map((by) => [by, series.progress[by]?.[i] ?? null])),
      ...Object.fromEntries(Object.keys(group.names).flatMap((name) => [name, name + "_std"]).map((name) => [name, series[name][i] ?? null])),
    }))));
  }

  function save(name, type, text) {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([text], { type }));
    link.download = name;
    link.click();
    URL.revokeObjectURL(link.href);
  }

  function saveCsv() {
    const rows = numbers();
    const cell = (value) => (typeof value === "string" ? '"' + value.replaceAll('"', '""') + '"' : value ?? "");
    save("curves.csv", "text/csv", [Object.keys(rows[0]), ...rows.map((row) => Object.values(row).map(cell))].join("\n") + "\n");
  }

  function scale(z) {
    const values = z.flat().filter((value) => value !== null);
    const [zmin, zmax] = around(values[0]);
    return values.every((value) => value === values[0]) ? { zmin, zmax } : {};
  }

  const map = (x, y, z, title) => [{
    type: "heatmap", x, y, z, ...scale(z), colorscale: "Viridis", hoverongaps: false, colorbar: { title: { text: title, side: "right" }, thickness: 12 },
    hovertemplate: "%{x}, %{y}: %{z}<extra></extra>",
  }];
  const beside = { hovermode: "closest", margin: { l: 84, r: 108, b: 48 } };

  function drawRates() {
    fill("rate-run", data.rates.map((run) => run.name));
    const rates = data.rates[Number(chosen("rate-run"))];
    if (!rates) return;
    fill("rate-epoch", rates.tables.map((_, epoch) => String(epoch + 1)));
    const epoch = Number(chosen("rate-epoch"));
    const clients = rates.clients.map((client) => "client " + client);
    const tall = (made) => ({ ...made, yaxis: { ...made.yaxis, nticks: 12, showticklabels: true, type: "category" } });
    draw("chart-rate-map", map(rates.rounds, clients, rates.tables[epoch], "learning rate"),
      tall(layout("round", "", beside)), rates.text + " Shown: epoch " + (epoch + 1) + ".", rates.name);
    draw("chart-moved-map", map(rates.rounds, clients, rates.moved, "distance moved"), tall(layout("round", "", beside)),
      "Heat map of how far each client moved from the global model in each round, for " + rates.name + ".", rates.name);
    const mode = rates.rounds.length > 1 ? "lines" : "markers";
    const bands = rates.bands.flatMap((band, index) => [
      { x: rates.rounds, y: band.mean, name: "epoch " + (index + 1), legendgroup: "e" + index, mode, line: { color: colour(index), width: 2 }, marker: { color: colour(index) } },
      {
        x: [...rates.rounds, ...rates.rounds.toReversed()], y: [...band.high, ...band.low.toReversed()], fill: "toself",
        fillcolor: faint(colour(index)), line: { width: 0 }, mode: "lines", legendgroup: "e" + index, showlegend: false, hoverinfo: "skip",
      },
    ]);
    draw("chart-rate-bands", bands, layout("round", "learning rate"),
      "Line chart of the mean learning rate in each local epoch over rounds, lowest to highest client shaded, for " + rates.name + ".", rates.name);
  }

  function drawLeftOut() {
    fill("left-run", data.left_out.map((run) => run.name));
    const run = data.left_out[Number(chosen("left-run"))];
    if (!run) return;
    const bars = Object.entries(run.counts).map(([cause, y], index) => ({ type: "bar", x: run.rounds, y, name: cause, uid: cause, marker: { color: colour(index) } }));
    const made = layout("round", "clients left out", { barmode: "stack", showlegend: true });
    const most = Math.max(...run.rounds.map((_, i) => bars.reduce((sum, bar) => sum + bar.y[i], 0)));
    if (most <= 10) made.yaxis.dtick = 1;
    draw("chart-left-out", bars, made, run.text, run.name);
  }

  function drawPartition() {
    fill("partition", data.partitions.map((split) => split.name));
    const split = data.partitions[Number(chosen("partition"))];
    if (!split) return;
    const x = split.table[0].map((_, client) => client);
    const y = split.table.map((_, label) => label);
    draw("chart-partition", map(x, y, split.table, "samples"), layout("client", "label", { ...beside, margin: { ...beside.margin, l: 64 } }), split.text, split.name);
  }

  const drawn = { groups: drawCurves, rates: drawRates, left_out: drawLeftOut, partitions: drawPartition };
  const drawAll = () => Object.values(drawn).forEach((one) => one());

  // A menu keeps its choice when its entries change.
  function fill(id, names, values = names.map((_, index) => String(index))) {
    const select = by(id);
    if (!select) return;
    const before = [...select.options].map((option) => option.text);
    if (before.join("\n") === names.join("\n")) return;
    const at = names.indexOf(before[select.selectedIndex]);
    select.replaceChildren(...names.map((name, index) => new Option(name, values[index])));
    select.selectedIndex = at >= 0 ? at : 0;
  }

  // Tables: numbers by value, words by letter, empty cells last.
  function sortBy(table, column, descending) {
    const body = table.tBodies[0];
    const key = (row) => row.cells[column].dataset.value;
    const number = (value) => (value === undefined || value === "" ? NaN : Number(value));
    const rows = [...body.rows];
    const numeric = rows.every((row) => key(row) === undefined || !Number.isNaN(number(key(row))));
    rows.sort((a, b) => {
      const [one, two] = [key(a), key(b)];
      if (one === undefined || two === undefined) return (one === undefined) - (two === undefined);
      const order = numeric ? number(one) - number(two) : one.localeCompare(two);
      return descending ? -order : order;
    });
    body.append(...rows);
    for (const [index, head] of [...table.tHead.rows[0].cells].entries()) {
      if (index === column) head.setAttribute("aria-sort", descending ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    }
  }

  document.addEventListener("click", (event) => {
    const head = event.target.closest("th");
    if (!event.target.closest("th button")) return;
    const first = head.classList.contains("number") ? "descending" : "ascending";
    const now = head.getAttribute("aria-sort");
    sortBy(head.closest("table"), head.cellIndex, now === null ? first === "descending" : now === "ascending");
  });

  // A page that follows runs: what has changed comes from the server, and is put in place of what was there.
  const title = document.title;
  const element = (tag, text, more = {}) => Object.assign(document.createElement(tag), { textContent: text, ...more });

  function tell(status) {
    by("status").className = status.word;
    by("status").textContent = status.text;
    by("about").textContent = status.about;
    by("unfinished").replaceChildren(...status.lines.map((line) => element("li", line)));
    document.title = `${status.text} – ${title}`;
  }

  function rewrite(old, made) {
    const [before, after] = [old, made].map((words) => ({ tables: [...words.querySelectorAll("table")], details: [...words.querySelectorAll("details")] }));
    after.details.forEach((one, index) => { one.open = before.details[index]?.open ?? false; });
    after.tables.forEach((table, index) => {
      const head = before.tables[index]?.querySelector("th[aria-sort]");
      if (head && head.cellIndex < table.tHead.rows[0].cells.length) sortBy(table, head.cellIndex, head.getAttribute("aria-sort") === "descending");
    });
    old.replaceWith(made);
  }

  function arrange(sections) {
    const main = by("main");
    const before = [...main.children];
    const now = sections.map((html, index) => {
      if (html === null) return before[index];
      const made = document.createRange().createContextualFragment(html).firstElementChild;
      const old = by(made.id);
      if (old) rewrite(old.querySelector(".words"), made.querySelector(".words"));
      return old ?? made;
    });
    before.filter((section) => !now.includes(section)).forEach((section) => section.remove());
    now.forEach((section, index) => { if (main.children[index] !== section) main.insertBefore(section, main.children[index] ?? null); });
    const links = now.map((section) => element("a", section.querySelector("h2").textContent, { href: "#" + section.id }));
    document.querySelector("nav").replaceChildren(...links.flatMap((link) => [link, " "]));
  }

  async function follow() {
    const began = performance.now();
    try {
      const answer = await (await fetch("data?since=" + data.version)).json();
      tell(answer.status);
      if (answer.version !== data.version) {
        const { sections, ...rest } = answer.changes;
        arrange(sections);
        for (const [key, parts] of Object.entries(rest)) {
          const whole = Array.isArray(data[key]) ? data[key] : [data[key]];
          const now = parts.map((part, index) => part ?? whole[index]);
          data[key] = Array.isArray(data[key]) ? now : now[0];
        }
        data.version = answer.version;
        for (const [key, redraw] of Object.entries(drawn)) if (rest[key].some((part) => part !== null)) redraw();
      }
    } catch {
      by("status").className = "trouble";
      by("status").textContent = "no news: fedagg watch has ended, or cannot be reached";
    }
    setTimeout(follow, Math.max(1000, 5 * (performance.now() - began))); // the run needs the machine more than the page does
  }

  const menus = { group: drawCurves, progress: drawCurves, "rate-run": drawRates, "rate-epoch": drawRates, "left-run": drawLeftOut, partition: drawPartition };
  document.addEventListener("change", (event) => menus[event.target.id]?.());
  const saving = { "save-csv": saveCsv, "save-json": () => save("curves.json", "application/json", JSON.stringify(numbers())) };
  document.addEventListener("click", (event) => saving[event.target.id]?.());
  dark.addEventListener("change", drawAll);
  let width = innerWidth;
  let later;
  addEventListener("resize", () => {
    clearTimeout(later);
    if (width !== innerWidth) later = setTimeout(drawAll, 200); // legends need other room
    width = innerWidth;
  });
  drawAll();
  if (data.version) setTimeout(follow, 1000);
})();
