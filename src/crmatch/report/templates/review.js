"use strict";
// Cards of pictures: sorts, filters, large view, a key per class. A live page sends every choice to crmatch label, which writes
// it to labels.csv; a page in a file keeps choices in the browser and offers labels.csv as a download.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const { images, live } = data;
  const element = (id) => document.getElementById(id);
  const grid = element("grid"), large = element("large");
  const PAGE = 120; // number of cards created at once; scrolling near the end creates more
  const UNSURE = "", OUT = "-";
  const number = (value) => value.toLocaleString("en");
  const narrow = matchMedia("(max-width: 700px)").matches;

  // The label of an image (i.l) is a class, UNSURE, OUT, or null; without a choice it is that of its directory (i.b).
  const here = new Map(); // image -> label, of the choices made on this page
  images.forEach((image, place) => { image.l ??= null; image.order = place; });
  if (!live) {
    const byName = new Map(images.map((image) => [image.n, image]));
    try {
      for (const [name, label] of Object.entries(JSON.parse(localStorage.getItem(data.key)) || {})) {
        const image = byName.get(name);
        if (image) { image.l = label ?? image.b ?? null; here.set(image, label); }
      }
    } catch { /* private windows */ }
  }

  // The key of a class is its first letter if all first letters differ, else 1..9 and a..z in order.
  const classes = [], keys = [];
  const initials = data.classes.map((name) => name.slice(0, 1).toLowerCase());
  const distinct = new Set(initials).size === initials.length && initials.every((letter) => /[a-z0-9]/.test(letter));
  function addClass(name) {
    const letter = name.slice(0, 1).toLowerCase();
    const free = [...(distinct && /[a-z0-9]/.test(letter) ? letter : ""), ..."123456789abcdefghijklmnopqrstuvwxyz"];
    classes.push(name);
    keys.push(free.find((one) => !keys.includes(one)) ?? "");
  }
  data.classes.forEach(addClass);
  for (const image of images) if (image.l && image.l !== OUT && !classes.includes(image.l)) addClass(image.l);

  const orders = {
    suggested: (a, b) => a.order - b.order,
    uncertain: (a, b) => b.u - a.u,
    disagreement: (a, b) => b.d - a.d,
    surprise: (a, b) => b.s - a.s,
    class: (a, b) => a.c[0] - b.c[0] || a.p[0] - b.p[0],
  };
  let visible = [], made = 0, current = null; // current: the card that keys apply to
  const history = []; // choices to undo: [[image, earlier choice or undefined], ...]

  const make = (tag, name, text) => {
    const node = document.createElement(tag);
    if (name) node.className = name;
    if (text !== undefined) node.textContent = text;
    return node;
  };
  const percent = (share) => `${Math.round(100 * share)} %`;
  const thumbnail = (image) => (live ? `thumbnail/${image.i}` : image.t);

  function card(image) {
    const node = make("div", "card");
    node.tabIndex = -1;
    node.setAttribute("role", "listitem");
    const picture = make("img");
    Object.assign(picture, { loading: "lazy", decoding: "async", alt: "", src: thumbnail(image) });
    const name = make("div", "name");
    name.append(make("bdi", "", image.n));
    name.title = image.n;
    node.append(picture, name);
    if (image.c) {
      const belief = make("div", "belief");
      belief.append(make("b", "", classes[image.c[0]]), make("span", "", percent(image.p[0])));
      belief.firstChild.title = classes[image.c[0]];
      const meter = make("div", "meter"), bar = make("i");
      bar.style.width = `${100 * image.p[0]}%`;
      meter.append(bar);
      const others = image.c.slice(1).map((one, rank) => `${classes[one]} ${percent(image.p[rank + 1])}`);
      node.append(belief, meter, make("div", "others", others.join(", ")));
    }
    const select = make("select");
    select.setAttribute("aria-label", `class of ${image.n}`);
    node.append(select);
    picture.addEventListener("click", () => { point(node); enlarge(); });
    node.addEventListener("focusin", () => point(node));
    select.addEventListener("change", () => {
      if (select.value === "new") newClass([image]);
      else choose([image], select.value === "none" ? null : select.value.slice(1));
    });
    node.image = image;
    show(node);
    return node;
  }

  function show(node) {
    const { image } = node, select = node.querySelector("select");
    const options = [["no label", "none"], ...classes.map((name) => [name, `=${name}`]), ["not sure", "="], ["leave out", `=${OUT}`]];
    if (select.length !== options.length + 1) {
      select.replaceChildren(...[...options, ["new class…", "new"]].map(([text, value]) => new Option(text, value)));
      if (image.b) select.querySelector('[value="="]').disabled = true; // its directory names a class
    }
    select.value = image.l === null ? "none" : `=${image.l}`;
    node.classList.toggle("done", Boolean(image.l) && image.l !== OUT);
    node.classList.toggle("unsure", image.l === UNSURE);
    node.classList.toggle("out", image.l === OUT);
    const said = image.c ? `predicted ${classes[image.c[0]]}` : "no label";
    node.setAttribute("aria-label", `${image.n}, ${image.l === null ? said : `labeled ${words(image.l)}`}`);
  }
  const words = (label) => (label === UNSURE ? "not sure" : label === OUT ? "left out" : label);

  function say(text, bad = false) {
    element("message").textContent = text;
    element("message").hidden = !text;
    element("message").classList.toggle("bad", bad);
  }

  // Choices are sent one after another, so that the last one counts.
  let sending = Promise.resolve(), unsaved = 0;
  async function post(path, values) {
    const answer = await fetch(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(values) });
    const result = await answer.json();
    if (!answer.ok) throw new Error(result.error);
    return result;
  }
  function save(chosen, label) {
    if (!live) {
      const kept = Object.fromEntries([...here].map(([image, one]) => [image.n, one]));
      try { localStorage.setItem(data.key, JSON.stringify(kept)); } catch { /* private windows */ }
      return;
    }
    sending = sending.then(() => post("labels", { label, pictures: chosen.map((image) => image.i) })).then(
      () => mark(chosen, false),
      (error) => {
        unsaved += chosen.length;
        mark(chosen, true);
        const stopped = error instanceof TypeError ? "crmatch label is not running any more; start it again." : error.message;
        say(`${number(unsaved)} choice${unsaved === 1 ? " was" : "s were"} not saved: ${stopped}`, true);
      },
    );
  }
  function mark(chosen, failed) {
    for (const node of grid.children) if (chosen.includes(node.image)) node.classList.toggle("failed", failed);
  }

  // Several images get one label: a class, UNSURE, OUT, or null for none.
  function choose(chosen, label, remember = true) {
    chosen = chosen.filter((image) => label !== UNSURE || !image.b);
    if (!chosen.length) return say("Its directory names its class. Leave it out instead.");
    if (remember) history.push(chosen.map((image) => [image, here.get(image), image.l]));
    for (const image of chosen) { image.l = label ?? image.b ?? null; here.set(image, label); }
    say("");
    save(chosen, label);
    update(chosen);
  }
  function update(chosen) {
    for (const node of grid.children) if (chosen.includes(node.image)) show(node);
    if (large.open) enlarge();
    count();
  }
  function undo() {
    const back = new Map();
    for (const [image, choice, label] of history.pop() ?? []) {
      const earlier = choice === undefined && label !== image.b ? label : choice ?? null;
      if (!back.has(earlier)) back.set(earlier, []);
      back.get(earlier).push(image);
    }
    for (const [label, chosen] of back) choose(chosen, label, false);
  }
  function newClass(chosen) {
    const name = (prompt("Name of the new class") ?? "").trim();
    const fits = name && name !== OUT && name.length <= 100;
    if (fits && !classes.includes(name)) { addClass(name); showKeys(); }
    if (fits) choose(chosen, name);
    for (const node of grid.children) show(node);
    return fits;
  }

  function count() {
    const labels = [...here.values()].filter((label) => label !== null && label !== UNSURE && label !== OUT).length;
    element("count").textContent = `${number(labels)} label${labels === 1 ? "" : "s"}`;
    element("undo").disabled = !history.length;
    for (const id of ["download", "clear"]) if (element(id)) element(id).disabled = !here.size;
  }

  function more() {
    const part = document.createDocumentFragment();
    for (const image of visible.slice(made, made + PAGE)) part.append(card(image));
    made = Math.min(made + PAGE, visible.length);
    grid.append(part);
  }

  const states = {
    "": () => true,
    open: (image) => image.l === null,
    labeled: (image) => Boolean(image.l) && image.l !== OUT,
    here: (image) => here.has(image),
    unsure: (image) => image.l === UNSURE,
    out: (image) => image.l === OUT,
    contradicting: (image) => image.x !== undefined,
  };
  function refresh() {
    const sought = element("search").value.trim().toLowerCase();
    const believed = element("believed").value, least = Number(element("least").value) / 100, state = element("state").value;
    const sort = element("sort").value;
    visible = images.filter((image) => {
      if (!states[state](image) || ((believed || least) && !image.c)) return false;
      if ((believed !== "" && image.c[0] !== Number(believed)) || (least && image.p[0] < least)) return false;
      const named = `${image.n}\n${image.c ? classes[image.c[0]] : ""}\n${image.l ?? ""}`;
      return !sought || named.toLowerCase().includes(sought);
    });
    const predicted = visible.filter((image) => image.c), others = visible.filter((image) => !image.c);
    visible = sort === "suggested" ? visible : [...predicted.sort(orders[sort]), ...others];
    if (state === "contradicting") visible.sort((a, b) => a.x - b.x);
    element("shown").textContent = `${number(visible.length)} of ${number(images.length)} pictures`;
    const open = believed === "" ? 0 : visible.filter((image) => image.l === null).length;
    element("many").disabled = !open;
    element("many").textContent = open ? `confirm these ${number(open)}` : "confirm these";
    grid.replaceChildren();
    made = 0;
    more();
    current = grid.firstChild;
    if (current) current.tabIndex = 0;
  }

  function columns() {
    const top = grid.firstChild ? grid.firstChild.offsetTop : 0;
    let found = 0;
    for (const node of grid.children) { if (node.offsetTop !== top) break; found += 1; }
    return Math.max(1, found);
  }
  function point(node) {
    if (current) current.tabIndex = -1;
    current = node;
    node.tabIndex = 0;
  }
  function move(steps) {
    const place = [...grid.children].indexOf(current) + steps;
    if (place >= grid.children.length && made < visible.length) more();
    point(grid.children[Math.max(0, Math.min(place, grid.children.length - 1))]);
    current.scrollIntoView({ block: "nearest" });
    if (large.open) enlarge();
    else current.focus();
  }

  // The large view: the original, and a button for everything that a key does.
  let enlarged = null;
  function enlarge() {
    enlarged = current;
    const { image } = current, original = element("original"), address = live ? `picture/${image.i}` : image.o ?? image.t;
    if (original.getAttribute("src") !== address) original.src = address;
    original.onerror = () => { original.onerror = null; delete image.o; original.src = thumbnail(image); }; // it is elsewhere
    original.alt = image.n;
    original.parentNode.classList.toggle("pixelated", Boolean(data.pixelated));
    const said = image.c ? `: ${classes[image.c[0]]} ${percent(image.p[0])}` : "";
    element("caption").textContent = `${image.n}${said}${image.l === null ? "" : ` (${words(image.l)})`}`;
    const button = (text, key, action, chosen = false) => {
      const node = make("button", chosen ? "chosen" : "", text);
      node.type = "button";
      if (key) node.prepend(make("kbd", "", key));
      node.addEventListener("click", action);
      return node;
    };
    element("choices").replaceChildren(
      ...classes.map((name, place) => button(name, keys[place], () => decide(name), image.l === name)),
      button("not sure", "?", () => decide(UNSURE), image.l === UNSURE),
      button("leave out", OUT, () => decide(OUT), image.l === OUT),
      button("new class…", "+", () => { if (newClass([image])) move(1); }),
      button("‹", "", () => move(-1)),
      button("›", "", () => move(1)),
    );
    if (!large.open) { large.showModal(); original.focus(); } // not a button, which Enter would press
  }
  function decide(label) {
    choose([current.image], label);
    move(1);
  }
  element("close").addEventListener("click", () => large.close());
  large.addEventListener("close", () => enlarged.focus()); // not the card that had the focus when it was opened

  document.addEventListener("keydown", (event) => {
    const where = event.target.tagName, { key } = event;
    if (/^(INPUT|SELECT)$/.test(where)) return;
    if ((event.ctrlKey || event.metaKey) && key === "z") { undo(); event.preventDefault(); }
    if (event.ctrlKey || event.metaKey || event.altKey || !current) return;
    if (/^(BUTTON|SUMMARY)$/.test(where) && (key === "Enter" || key === " ")) return;
    const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns(), ArrowUp: -columns() }[key];
    const place = keys.indexOf(key.toLowerCase());
    if (key === "/") { large.close(); element("filters").open = true; element("search").focus(); }
    else if (steps) move(large.open ? Math.sign(steps) : steps);
    else if (key === " ") { if (large.open) large.close(); else enlarge(); }
    else if (key === "Enter") { if (current.image.c) decide(classes[current.image.c[0]]); }
    else if (key === "Backspace" || key === "Delete") choose([current.image], null);
    else if (key === "?") decide(UNSURE);
    else if (key === OUT) decide(OUT);
    else if (key === "+") { if (newClass([current.image])) move(1); }
    else if (place >= 0) decide(classes[place]);
    else return;
    event.preventDefault();
  });

  function csv() {
    // A quote before what spreadsheets would compute, as in data/spreadsheet.py.
    const guarded = (text) => (/^'*[=+\-@\t\r]./.test(text) && Number.isNaN(Number(text)) ? `'${text}` : text);
    const quoted = (text) => (/[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);
    const labels = new Map(data.kept);
    for (const [image, label] of here) { if (label === null) labels.delete(image.n); else labels.set(image.n, label); }
    return ["path,label", ...[...labels].map((line) => line.map(guarded).map(quoted).join(","))].join("\n") + "\n";
  }
  function showKeys() {
    element("keys").replaceChildren(...classes.map((name, place) => {
      const item = make("span");
      item.append(make("kbd", "", keys[place]), name);
      return item;
    }), make("span", "", "Enter confirms, Space enlarges, ? not sure, - leaves out, + new class, Backspace no label, arrows move"));
  }

  element("undo").addEventListener("click", undo);
  element("many").addEventListener("click", () => {
    const open = visible.filter((image) => image.l === null), name = classes[Number(element("believed").value)];
    if (!confirm(`Label ${number(open.length)} pictures as ${name}?`)) return;
    choose(open, name);
    element("many").disabled = true;
  });
  element("done")?.addEventListener("click", async () => {
    await sending;
    try {
      const { next } = await post("done", {});
      say(`Everything is saved, and you can close this page. Next: ${next}`);
    } catch { say("crmatch label is not running any more.", true); }
  });
  element("download")?.addEventListener("click", () => {
    const link = make("a");
    link.href = URL.createObjectURL(new Blob([csv()], { type: "text/csv" }));
    link.download = "labels.csv";
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  });
  element("clear")?.addEventListener("click", () => {
    if (!confirm("Forget all choices made on this page?")) return;
    choose([...here.keys()], null);
    here.clear();
    history.length = 0;
    save([], null);
    location.reload();
  });

  for (const node of document.querySelectorAll(".model")) node.hidden = !images.some((image) => image.c);
  element("believed").append(...data.classes.map((name, place) => new Option(name, String(place))));
  element("filters").open = !narrow;
  grid.classList.toggle("pixelated", Boolean(data.pixelated));
  for (const id of ["sort", "believed", "state", "least"]) element(id).addEventListener("change", refresh);
  let waiting = 0;
  element("search").addEventListener("input", () => { clearTimeout(waiting); waiting = setTimeout(refresh, 120); });
  new IntersectionObserver((entries) => {
    if (entries[0].isIntersecting && made < visible.length) more();
  }, { rootMargin: "800px" }).observe(element("more"));
  showKeys();
  count();
  refresh();
  current?.focus({ preventScroll: true });
})();
