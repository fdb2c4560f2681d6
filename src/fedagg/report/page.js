"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const narrow = matchMedia("(max-width: 40rem)");
  const dashes = ["solid", "dash", "dashdot", "dot"];

  // Okabe and Ito's colours, which colour-blind readers can tell apart; black becomes white in the dark.
  const colours = () => ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", dark.matches ? "#FFFFFF" : "#000000", "#999999"];
  const colour = (index) => colours()[index % 8];
  const faint = (hex) => hex + "26";
  const variable = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const chosen = (id) => document.getElementById(id)?.value;

  function layout(x, y, more = {}) {
    const axis = { gridcolor: variable("--line"), zerolinecolor: variable("--line"), linecolor: variable("--line") };
    return {
      font: { color: variable("--ink"), family: "system-ui, sans-serif", size: 13 },
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      margin: { l: 64, r: 12, t: 8, b: 48 },
      xaxis: { ...axis, title: { text: x } },
      yaxis: { ...axis, title: { text: y } },
      legend: { orientation: "h", x: 0, xanchor: "left", yref: "container", y: 0, yanchor: "bottom" },
      hovermode: narrow.matches ? "closest" : "x unified",
      hoverlabel: { bgcolor: variable("--paper"), font: { color: variable("--ink") } },
      ...more,
    };
  }

  // Left alone, plotly shows a single value on a scale of its own, up to one more and one less.
  const around = (value) => (value === 0 ? [-1, 1] : [Math.min(0, 2 * value), Math.max(0, 2 * value)]);

  function draw(id, traces, made, text) {
    const place = document.getElementById(id);
    if (!place) return;
    const known = traces.some((trace) => (trace.y || trace.z || []).flat().some((value) => value !== null));
    place.parentElement.hidden = !known;
    if (!known) return;
    place.setAttribute("role", "img");
    place.setAttribute("aria-label", text);
    document.getElementById(id + "-text").textContent = text;
    // The legend gets the room it needs below the plot, however many lines it takes on this screen.
    const entries = traces.filter((trace) => trace.name && trace.showlegend !== false).length;
    const below = entries > 1 ? 24 * Math.ceil(entries / Math.max(1, Math.floor(place.clientWidth / 150))) + 16 : 0;
    place.style.height = `${400 + below}px`;
    made.margin = { ...made.margin, b: 48 + below, autoexpand: false };
    const values = traces.flatMap((trace) => (trace.z ? [] : trace.y)).filter((value) => value !== null);
    if (values.length && values.every((value) => value === values[0])) made.yaxis = { ...made.yaxis, range: around(values[0]) };
    // Few rounds, and plotly would write 1.5 between the first and the second.
    if (made.xaxis.title.text === data.progress.rounds && traces.every((trace) => Math.max(...trace.x) <= 10)) made.xaxis = { ...made.xaxis, dtick: 1 };
    Plotly.react(place, traces, made, { responsive: true, displaylogo: false, modeBarButtonsToRemove: ["select2d", "lasso2d"] });
  }

  // A line over seeds with its standard deviation as a band; a click on the legend hides both.
  function lines(group, figure, by) {
    const traces = [];
    group.series.forEach((series, index) => {
      const x = series.progress[by];
      if (!x) return;
      const at = series[figure].map((value, i) => (value === null ? -1 : i)).filter((i) => i >= 0);
      const y = at.map((i) => series[figure][i]);
      const std = at.map((i) => series[figure + "_std"][i]);
      const xs = at.map((i) => x[i]);
      if (!y.length) return;
      const style = { color: colour(index), width: series.name.startsWith("FedAgg") ? 3 : 2, dash: dashes[Math.floor(index / 8) % 4] };
      const mode = y.length > 1 ? "lines" : "markers";
      traces.push({ x: xs, y, name: series.name, legendgroup: series.name, mode, line: style, marker: { color: style.color } });
      if (std.every((value) => value !== null)) {
        traces.push({
          x: [...xs, ...xs.toReversed()],
          y: [...y.map((value, i) => value + std[i]), ...y.map((value, i) => value - std[i]).toReversed()],
          fill: "toself", fillcolor: faint(style.color), line: { width: 0 }, mode: "lines",
          legendgroup: series.name, showlegend: false, hoverinfo: "skip", name: series.name + " ± std",
        });
      }
    });
    return traces;
  }

  function drawCurves() {
    const group = data.groups[Number(chosen("group"))];
    const by = chosen("progress");
    for (const [figure, label] of Object.entries(group.names)) {
      draw("chart-" + figure, lines(group, figure, by), layout(data.progress[by], label), group.texts[figure]);
    }
  }

  // What all curves show, a row for every round of every line.
  function numbers() {
    return data.groups.flatMap((group) => group.series.flatMap((series) => series.accuracy.map((_, i) => ({
      setting: group.name, method: series.name, seeds: series.seeds,
      ...Object.fromEntries(Object.keys(data.progress).map((by) => [by, series.progress[by]?.[i] ?? null])),
      ...Object.fromEntries(Object.keys(data.names).flatMap((name) => [name, name + "_std"]).map((name) => [name, series[name][i] ?? null])),
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

  function fillEpochs() {
    const rates = data.rates[Number(chosen("rate-run"))];
    const select = document.getElementById("rate-epoch");
    select.replaceChildren(...Array.from({ length: rates.epochs }, (_, i) => new Option(String(i + 1), String(i))));
  }

  function drawRates() {
    if (!data.rates.length) return;
    const rates = data.rates[Number(chosen("rate-run"))];
    const epoch = Number(chosen("rate-epoch"));
    const clients = rates.clients.map((client) => "client " + client);
    const plain = { hovermode: "closest", margin: { l: 84, r: 108, t: 8, b: 48 } };
    const some = { nticks: 12, showticklabels: true };
    const tall = (made) => ({ ...made, yaxis: { ...made.yaxis, ...some, type: "category" } });
    draw("chart-rate-map", map(rates.rounds, clients, rates.tables[epoch], "learning rate"),
      tall(layout("round", "", plain)), rates.text + " Shown: epoch " + (epoch + 1) + ".");
    draw("chart-moved-map", map(rates.rounds, clients, rates.moved, "distance moved"),
      tall(layout("round", "", plain)), "Heat map of how far each client moved from the global model in each round, for " + rates.name + ".");
    const mode = rates.rounds.length > 1 ? "lines" : "markers";
    const bands = rates.bands.flatMap((band, index) => [
      { x: rates.rounds, y: band.mean, name: "epoch " + (index + 1), legendgroup: "e" + index, mode, line: { color: colour(index), width: 2 }, marker: { color: colour(index) } },
      {
        x: [...rates.rounds, ...rates.rounds.toReversed()], y: [...band.high, ...band.low.toReversed()], fill: "toself",
        fillcolor: faint(colour(index)), line: { width: 0 }, mode: "lines", legendgroup: "e" + index, showlegend: false, hoverinfo: "skip",
      },
    ]);
    draw("chart-rate-bands", bands, layout("round", "learning rate"),
      "Line chart of the mean learning rate in each local epoch over rounds, lowest to highest client shaded, for " + rates.name + ".");
  }

  function drawPartition() {
    if (!data.partitions.length) return;
    const split = data.partitions[Number(chosen("partition"))];
    const x = split.table[0].map((_, client) => client);
    const y = split.table.map((_, label) => label);
    draw("chart-partition", map(x, y, split.table, "samples"), layout("client", "label", { hovermode: "closest", margin: { l: 64, r: 108, t: 8, b: 48 } }), split.text);
  }

  function drawAll() {
    drawCurves();
    drawRates();
    drawPartition();
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

  for (const table of document.querySelectorAll("table")) {
    for (const [column, head] of [...table.tHead.rows[0].cells].entries()) {
      head.querySelector("button").addEventListener("click", () => {
        const first = head.classList.contains("number") ? "descending" : "ascending";
        const now = head.getAttribute("aria-sort");
        sortBy(table, column, now === null ? first === "descending" : now === "ascending");
      });
    }
  }

  document.getElementById("group").addEventListener("change", drawCurves);
  document.getElementById("progress").addEventListener("change", drawCurves);
  document.getElementById("save-csv").addEventListener("click", saveCsv);
  document.getElementById("save-json").addEventListener("click", () => save("curves.json", "application/json", JSON.stringify(numbers())));
  document.getElementById("rate-run")?.addEventListener("change", () => { fillEpochs(); drawRates(); });
  document.getElementById("rate-epoch")?.addEventListener("change", drawRates);
  document.getElementById("partition")?.addEventListener("change", drawPartition);
  dark.addEventListener("change", drawAll);
  narrow.addEventListener("change", drawAll);
  if (data.rates.length) fillEpochs();
  drawAll();
})();
