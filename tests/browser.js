// Opens each page of a site in a frame, at each width, and sends what it sees to the server.

const settle = () => new Promise((done) => setTimeout(done, 100));
const frame = document.body.appendChild(document.createElement("iframe"));
frame.style.height = "900px";

async function open(path, width) {
  frame.style.width = `${width}px`;
  await new Promise((done) => {
    frame.onload = done;
    frame.src = path;
  });
  await settle(); // scripts of the page that start after its load
  return frame.contentDocument;
}

async function look(path, width) {
  const page = await open(path, width);
  const { scrollWidth, clientWidth } = page.scrollingElement;
  return {
    path,
    width,
    beyond: scrollWidth - clientWidth,
    errors: frame.contentWindow.errors,
    links: [...page.querySelectorAll("a[href]")]
      .filter((link) => link.origin === location.origin)
      .map((link) => link.pathname + decodeURIComponent(link.hash)),
    anchors: [...page.querySelectorAll("[id]")].map((element) => element.id),
  };
}

async function find(word) {
  const page = await open(`/?q=${encodeURIComponent(word)}`, 1280);
  for (let waits = 0; waits < 100; waits++) {
    const results = page.querySelector(".md-search-result__list").textContent.toLowerCase();
    if (results.includes(word.toLowerCase())) return true;
    await settle();
  }
  return false;
}

async function main({ paths, widths, words }) {
  const views = [];
  for (const path of paths) for (const width of widths) views.push(await look(path, width));
  const missing = [];
  for (const word of words) if (!(await find(word))) missing.push(word);
  await fetch("/report", { method: "POST", body: JSON.stringify({ views, missing }) });
}

fetch("/request").then((reply) => reply.json()).then(main);
