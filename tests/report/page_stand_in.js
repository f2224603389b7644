// Runs the script of a page over a stand-in of the browser, and prints what it drew and said as JSON.
"use strict";
const fs = require("fs");
const folder = process.argv[2];
const texts = JSON.parse(fs.readFileSync(folder + "/texts.json", "utf8"));
const WIDTH = 1200, HEIGHT = 520;

let rectangles = [];
const context = new Proxy({
  fillRect: (x, y, width, height) => rectangles.push([x, y, width, height]),
  clearRect: () => { rectangles = []; },
  measureText: (text) => ({ width: 6.5 * text.length }),
}, { get: (known, name) => known[name] ?? (() => undefined), set: () => true });

const handlers = {}, elements = {};
const element = (id) => ({
  textContent: texts[id] ?? "", value: "",
  addEventListener: (kind, handler) => { handlers[id + " " + kind] = handler; },
  getContext: () => context, setPointerCapture: () => undefined, scrollIntoView: () => undefined,
  getBoundingClientRect: () => ({ left: 0, top: 0, width: WIDTH, height: HEIGHT }),
});
const opened = [], posted = [], saved = [], heard = new Set();
const perfetto = { postMessage: (message, origin) => posted.push([message, origin]) };
global.document = {
  title: "a plan",
  getElementById: (id) => (elements[id] ??= element(id)),
  createElement: () => ({ click() { saved.push(this); } }),
};
global.window = {
  devicePixelRatio: 1,
  addEventListener: (kind, handler) => { if (kind === "message") heard.add(handler); },
  removeEventListener: (kind, handler) => heard.delete(handler),
  open: (address) => { opened.push(address); return perfetto; },
};
global.requestAnimationFrame = (draw) => draw();
const later = global.setTimeout, blobs = [];
global.setTimeout = (call) => call();
URL.createObjectURL = (blob) => { blobs.push(blob); return "blob:"; };
new Function(fs.readFileSync(folder + "/code.js", "utf8"))();

const event = (x, y, more) => ({ clientX: x, clientY: y, deltaX: 0, deltaY: 0, pointerId: 1, preventDefault: () => undefined, ...more });
const send = (name, ...rest) => handlers["timeline " + name](event(...rest));
const drawn = () => JSON.stringify(rectangles);
const beyond = ([x, y, width, height]) => x < -1 || y < -1 || x + width > WIDTH + 2 || y + height > HEIGHT + 2;
const said = (x, y) => { send("pointermove", x, y); return elements.tip.textContent; };

const found = { whole: drawn(), rectangles: rectangles.length };
// the first bar of the compute lane: in order, actions before it are copies
let px = 71;
while (px < WIDTH && !said(px, 260).includes("run fwd.0")) px++;
found.action = said(px, 260);
found.memory = said(px + 6, 120);
send("pointerdown", px, 260);
send("pointerup", px, 260);
found.clicked = elements.filter.value;
send("wheel", 400, 260, { deltaY: -600 });
found.scrolled = drawn();
send("wheel", 400, 260, { deltaY: -600, ctrlKey: true });
found.zoomed = drawn();
found.outside = rectangles.filter(beyond).length;
send("dblclick", 0, 0);
found.reset = drawn();
handlers["closer click"]();
found.button = drawn();
handlers["all click"]();
elements.filter.value = "Fetch C0";
handlers["filter input"]();
found.filtered = elements.plan.textContent;
found.count = elements.found.textContent;

// Perfetto answers once it is there; what others say is not heard
const say = (message) => [...heard].forEach((handler) => handler(message));
const waits = (ms) => new Promise((done) => later(done, ms));
(async () => {
  if (texts.trace) {
    await handlers["perfetto click"]();
    await waits(150);
    const before = posted.map(([message]) => message).slice(0, 1);
    say({ source: {}, origin: "https://ui.perfetto.dev", data: "PONG" });
    say({ source: perfetto, origin: "https://elsewhere", data: "PONG" });
    const strangers = posted.filter(([message]) => message !== "PING").length;
    say({ source: perfetto, origin: "https://ui.perfetto.dev", data: "PONG" });
    const [message, told] = posted.at(-1);
    await handlers["download click"]();
    const text = (buffer) => Buffer.from(buffer).toString();
    found.sent = {
      before, strangers, told, opened: opened[0], trace: text(message.perfetto.buffer),
      saved: saved.length === 1 ? await blobs[0].text() : "",
    };
  }
  console.log(JSON.stringify(found));
})();
