"use strict";
// The review page: sorts, filters, keeps choices in the browser, and writes labels.csv. No other file is needed.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const { classes, images, key } = data;
  const element = (id) => document.getElementById(id);
  const grid = element("grid");
  const PAGE = 120; // number of cards created at once; scrolling near the end creates more

  let choices = {};
  try { choices = JSON.parse(localStorage.getItem(key)) || {}; } catch { choices = {}; }
  const keep = () => { try { localStorage.setItem(key, JSON.stringify(choices)); } catch { /* private windows */ } };
  const chosen = (image) => (Object.hasOwn(choices, image.n) ? choices[image.n] : null);

  // The key of a class is its first letter if all first letters differ, else 1..9 and a..z in order.
  const initials = classes.map((name) => name.slice(0, 1).toLowerCase());
  const distinct = new Set(initials).size === classes.length && initials.every((letter) => /[a-z0-9]/.test(letter));
  const keys = distinct ? initials : [..."123456789abcdefghijklmnopqrstuvwxyz"].slice(0, classes.length);

  const orders = {
    uncertain: (a, b) => b.u - a.u,
    disagreement: (a, b) => b.d - a.d,
    surprise: (a, b) => b.s - a.s,
    class: (a, b) => a.c[0] - b.c[0] || a.p[0] - b.p[0],
  };
  let visible = [];
  let made = 0;

  const make = (tag, name, text) => {
    const node = document.createElement(tag);
    if (name) node.className = name;
    if (text !== undefined) node.textContent = text;
    return node;
  };

  function card(image) {
    const node = make("div", "card");
    node.tabIndex = -1;
    node.setAttribute("role", "listitem");
    const picture = make("img");
    picture.loading = "lazy";
    picture.decoding = "async";
    picture.alt = image.n;
    picture.src = image.t;
    const belief = make("div", "belief");
    belief.append(make("b", "", classes[image.c[0]]), make("span", "", `${Math.round(100 * image.p[0])} %`));
    const meter = make("div", "meter");
    const bar = make("i");
    bar.style.width = `${100 * image.p[0]}%`;
    meter.append(bar);
    const others = image.c.slice(1).map((number, rank) => `${classes[number]} ${Math.round(100 * image.p[rank + 1])} %`);
    const select = make("select");
    select.setAttribute("aria-label", `class of ${image.n}`);
    select.append(new Option("no label", ""));
    classes.forEach((name, number) => select.append(new Option(name, String(number))));
    const name = make("div", "name", image.n);
    name.title = image.n;
    node.append(picture, name, belief, meter, make("div", "others", others.join(", ")), select);
    picture.addEventListener("click", () => { node.focus(); set(node, chosen(image) === null ? image.c[0] : null); });
    select.addEventListener("change", () => set(node, select.value === "" ? null : Number(select.value)));
    node.image = image;
    show(node);
    return node;
  }

  function show(node) {
    const label = chosen(node.image);
    node.classList.toggle("done", label !== null);
    node.querySelector("select").value = label === null ? "" : String(label);
    const words = label === null ? `predicted ${classes[node.image.c[0]]}` : `labeled ${classes[label]}`;
    node.setAttribute("aria-label", `${node.image.n}, ${words}`);
  }

  function set(node, label) {
    if (label === null) delete choices[node.image.n];
    else choices[node.image.n] = label;
    keep();
    show(node);
    count();
  }

  function count() {
    const number = Object.keys(choices).length;
    element("count").textContent = `${number.toLocaleString("en")} label${number === 1 ? "" : "s"}`;
    element("download").disabled = element("clear").disabled = number === 0;
  }

  function more() {
    const part = document.createDocumentFragment();
    for (const image of visible.slice(made, made + PAGE)) part.append(card(image));
    made = Math.min(made + PAGE, visible.length);
    grid.append(part);
  }

  function refresh() {
    const words = element("search").value.trim().toLowerCase();
    const believed = element("believed").value;
    const state = element("state").value;
    visible = images.filter((image) => {
      const label = chosen(image);
      if (believed !== "" && image.c[0] !== Number(believed)) return false;
      if (state !== "" && (label !== null) !== (state === "done")) return false;
      const named = `${image.n}\n${classes[image.c[0]]}\n${label === null ? "" : classes[label]}`;
      return !words || named.toLowerCase().includes(words);
    });
    visible.sort(orders[element("sort").value]);
    element("shown").textContent = `${visible.length.toLocaleString("en")} of ${images.length.toLocaleString("en")} pictures`;
    grid.replaceChildren();
    made = 0;
    more();
    if (grid.firstChild) grid.firstChild.tabIndex = 0;
  }

  function columns() {
    const top = grid.firstChild ? grid.firstChild.offsetTop : 0;
    let number = 0;
    for (const node of grid.children) { if (node.offsetTop !== top) break; number += 1; }
    return Math.max(1, number);
  }

  function move(node, steps) {
    const place = [...grid.children].indexOf(node) + steps;
    if (place >= grid.children.length && made < visible.length) more();
    const next = grid.children[Math.max(0, Math.min(place, grid.children.length - 1))];
    node.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
    next.scrollIntoView({ block: "nearest" });
  }

  grid.addEventListener("keydown", (event) => {
    const node = event.target.closest(".card");
    if (!node || event.target.tagName === "SELECT" || event.ctrlKey || event.metaKey || event.altKey) return;
    const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns(), ArrowUp: -columns() }[event.key];
    const number = keys.indexOf(event.key.toLowerCase());
    if (steps) move(node, steps);
    else if (event.key === "Enter" || event.key === " ") { set(node, node.image.c[0]); move(node, 1); }
    else if (event.key === "Backspace" || event.key === "Delete") set(node, null);
    else if (number >= 0) { set(node, number); move(node, 1); }
    else return;
    event.preventDefault();
  });

  document.addEventListener("keydown", (event) => {
    if (event.key !== "/" || /^(INPUT|SELECT)$/.test(event.target.tagName)) return;
    element("search").focus();
    event.preventDefault();
  });

  function csv() {
    const quoted = (text) => (/[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);
    const labels = new Map(data.kept);
    for (const [name, label] of Object.entries(choices)) labels.set(name, classes[label]);
    return ["path,label", ...[...labels].map((line) => line.map(quoted).join(","))].join("\n") + "\n";
  }

  element("download").addEventListener("click", () => {
    const link = make("a");
    link.href = URL.createObjectURL(new Blob([csv()], { type: "text/csv" }));
    link.download = "labels.csv";
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  });
  element("clear").addEventListener("click", () => {
    if (!confirm("Forget all labels given on this page?")) return;
    choices = {};
    keep();
    count();
    refresh();
  });

  classes.forEach((name, number) => element("believed").append(new Option(name, String(number))));
  keys.forEach((letter, number) => {
    const item = make("span");
    item.append(make("kbd", "", letter), classes[number]);
    element("keys").append(item);
  });
  element("keys").append(make("span", "", "Enter confirms, Backspace removes, arrows move"));
  grid.classList.toggle("pixelated", data.pixelated);
  for (const id of ["sort", "believed", "state"]) element(id).addEventListener("change", refresh);
  let waiting = 0;
  element("search").addEventListener("input", () => { clearTimeout(waiting); waiting = setTimeout(refresh, 120); });
  new IntersectionObserver((entries) => {
    if (entries[0].isIntersecting && made < visible.length) more();
  }, { rootMargin: "800px" }).observe(element("more"));
  count();
  refresh();
})();
