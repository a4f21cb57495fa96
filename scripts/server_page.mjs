// Tests foretoken-server's web page in headless Chromium: user actions, and screenshots of every state.
//
//   npm install --prefix target/page playwright-core
//   node scripts/server_page.mjs [--server target/release/foretoken-server] [--chromium /usr/bin/chromium] [--out target/page]
//
// Starts the server with the demo pair and writes screenshots to --out.

import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { mkdirSync } from "node:fs";
import { createRequire } from "node:module";
import { resolve } from "node:path";
import { parseArgs } from "node:util";

const { values } = parseArgs({ options: {
  server: { type: "string", default: "target/release/foretoken-server" },
  chromium: { type: "string", default: "/usr/bin/chromium" },
  out: { type: "string", default: "target/page" },
  page: { type: "string" }, // a file instead of the server's page
} });
const { chromium } = createRequire(resolve("target/page/package.json"))("playwright-core");
mkdirSync(values.out, { recursive: true });

// The demo pair, on a free port.
function start(...options) {
  const server = spawn(values.server, ["--port", "0", ...options], { stdio: ["ignore", "ignore", "pipe"] });
  return new Promise((done, failed) => {
    let log = "";
    server.on("exit", (code) => failed(new Error(`the server ended with ${code}: ${log}`)));
    server.stderr.on("data", (data) => {
      log += data;
      const url = /url="?(http:\/\/[0-9.:]+)/.exec(log.replace(/\x1b\[[0-9;]*m/g, ""));
      if (url) { server.removeAllListeners("exit"); done({ url: url[1], stop: () => server.kill("SIGTERM") }); }
    });
  });
}

const browser = await chromium.launch({ executablePath: values.chromium, args: ["--no-sandbox"] });
async function visit(url, options = {}) {
  const page = await browser.newPage({ viewport: { width: 1000, height: 720 }, ...options });
  page.problems = [];
  page.on("console", (message) => message.type() === "error" && page.problems.push(message.text()));
  page.on("pageerror", (error) => page.problems.push(String(error)));
  if (values.page) {
    const { readFileSync } = await import("node:fs");
    await page.route(url + "/", async (route) => {
      const response = await route.fetch();
      const nonce = /nonce-([0-9a-f]+)/.exec(response.headers()["content-security-policy"])[1];
      await route.fulfill({ response, body: readFileSync(values.page, "utf8").replaceAll("{nonce}", nonce) });
    });
  }
  await page.goto(url);
  return page;
}
// Changes a setting, whether or not the settings are open.
const set = (page, id, value) => page.evaluate(([id, value]) => { document.getElementById(id).value = value; }, [id, value]);
const shot = (page, name) => page.screenshot({ path: `${values.out}/${name}.png` });
const ended = (page) => page.waitForFunction(() => document.querySelector("#log").getAttribute("aria-busy") === "false", { timeout: 60_000 });

const server = await start();
const page = await visit(server.url);
await page.waitForFunction(() => document.querySelector("#model").textContent === "demo");
await shot(page, "first_visit");

// Streaming: tokens come with their origins; Stop ends it.
await set(page, "max_tokens", "4000");
await page.fill("#text", "impl Iterator for Counter {\n");
await page.keyboard.press("Enter");
await page.waitForFunction(() => document.querySelectorAll(".assistant .body span").length > 40);
assert.ok(await page.isVisible("#stop") && !(await page.isVisible("#send")));
await shot(page, "streaming");
await page.keyboard.press("Escape");
await ended(page);
assert.match(await page.textContent(".assistant .figures"), /tokens\/s, \d+ % drafted.*stopped/);
for (const origin of ["d", "t"]) assert.ok(await page.locator(`.assistant .body .${origin}`).count() > 0, origin);
assert.ok(await page.isVisible("#send"));

// Greedy: regenerating gives the same text, which is the server's own.
await set(page, "max_tokens", "60");
await page.click("#again");
await ended(page);
const text = () => page.evaluate(() => messages.at(-1).content.text);
const first = await text();
await page.click("#again");
await ended(page);
assert.equal(await text(), first);
assert.equal(await page.locator(".assistant").count(), 1);
const whole = await page.evaluate(async () => {
  const body = { messages: [{ role: "user", content: messages[0].content.text }], max_tokens: 60 };
  const response = await fetch("/v1/chat/completions", { method: "POST", headers: headers(), body: JSON.stringify(body) });
  return (await response.json()).choices[0].message.content;
});
assert.equal(first, whole);
assert.match(await page.textContent(".assistant .figures"), /60 tokens.*drafts accepted, max tokens reached/);

// Markdown becomes nodes, and HTML in it stays text; every character keeps its origin.
const source = "# Title\n\nSome **bold _and_ thin** text with `code` and [a link](https://example.org/a).\n<img src=x onerror=alert(1)> " +
  "[no](javascript:alert(1)) 2 * 3 * 4 snake_case_name\n\n- one\n- two\n\n1. first\n2. second\n\n> said\n\n```rust\nfn main() { *x }\n\n    indented\n```\nend";
const shown = await page.evaluate((text) => {
  const parent = document.createElement("div");
  new Markdown({ text, origins: [...text].map((_, i) => (i % 3 ? "d" : "t")).join("") }).render(parent);
  const tags = [...parent.querySelectorAll("*")].map((node) => node.tagName.toLowerCase()).filter((tag) => tag !== "span");
  const letters = [...parent.querySelectorAll("span")].map((span) => span.className.repeat(span.textContent.length)).join("");
  return { tags: [...new Set(tags)].sort(), text: parent.textContent, letters };
}, source);
assert.deepEqual(shown.tags, ["a", "blockquote", "br", "code", "div", "em", "h3", "li", "ol", "p", "pre", "strong", "ul"]);
assert.ok(shown.text.includes("<img src=x onerror=alert(1)> [no](javascript:alert(1)) 2 * 3 * 4 snake_case_name"));
assert.ok(shown.text.includes("fn main() { *x }\n\n    indented"));
assert.equal(shown.letters.length, shown.text.length);

// Errors: an invalid value, and a server that has stopped.
await page.click("#settings summary");
await page.fill("#temperature", "-1");
await shot(page, "settings");
await page.click("#again");
await page.waitForSelector("[role=alert]");
assert.match(await page.textContent("[role=alert]"), /temperature/);
await page.click("#settings summary");
await shot(page, "error");
assert.equal(await text(), first, "the answer that was not replaced");
assert.deepEqual(page.problems.filter((problem) => !problem.includes("400")), []);

// A text that ends while a setting is changed leaves the focus there.
await set(page, "temperature", "0");
await page.route("**/v1/chat/completions", () => {}); // never answered
await page.click("#again");
await page.click("#settings summary");
await page.focus("#system");
await page.keyboard.press("Escape");
await ended(page);
assert.equal(await page.evaluate(() => document.activeElement.id), "system");
await page.click("#settings summary");

// Cleared while it is regenerated, the former answer does not come back.
await page.click("#again");
await page.evaluate(() => document.querySelector("#clear").click());
await ended(page);
assert.deepEqual(await page.evaluate(() => [messages.length, document.querySelectorAll(".assistant").length]), [0, 0]);
await page.unroute("**/v1/chat/completions");

// Everything is reachable by keyboard and has an accessible name.
const names = [];
await page.focus("#text");
for (let i = 0; i < 4; i++) {
  await page.keyboard.press("Tab");
  names.push(await page.evaluate(() => document.activeElement.textContent.trim().split("\n")[0]));
}
assert.ok(names.includes("Send") && names.includes("Settings"), names.join());
const unnamed = await page.evaluate(() => [...document.querySelectorAll("input, textarea, button")]
  .filter((node) => !(node.labels && node.labels.length) && !node.textContent.trim()).length);
assert.equal(unnamed, 0);

// Dark mode, and a narrow screen.
const dark = await visit(server.url, { colorScheme: "dark" });
await set(dark, "max_tokens", "120");
await dark.fill("#text", "#[derive(Debug)]\nstruct ");
await dark.keyboard.press("Enter");
await dark.waitForSelector(".assistant");
await ended(dark);
await shot(dark, "dark");
const phone = await visit(server.url, { viewport: { width: 360, height: 640 }, hasTouch: true });
await set(phone, "max_tokens", "80");
await phone.click("#examples button");
await phone.waitForSelector(".assistant");
await ended(phone);
assert.ok(await phone.evaluate(() => document.documentElement.scrollWidth <= innerWidth), "it scrolls sideways");
await shot(phone, "phone");

// A server that requires an API key: the page loads and says what is missing.
const locked = await start("--api-key", "secret");
const keyed = await visit(locked.url);
await keyed.fill("#text", "fn main() {");
await keyed.keyboard.press("Enter");
await keyed.waitForSelector("[role=alert]");
assert.match(await keyed.textContent("[role=alert]"), /API key/);
await set(keyed, "max_tokens", "8");
assert.equal(await keyed.evaluate(() => document.activeElement.id), "key");
await keyed.keyboard.type("secret");
await keyed.click("#again");
await keyed.waitForFunction(() => document.querySelector(".assistant .figures")?.textContent.includes("8 tokens"));
locked.stop();

server.stop();
await new Promise((done) => setTimeout(done, 1000));
await page.fill("#text", "x");
await page.keyboard.press("Enter");
await page.waitForSelector("[role=alert]");
assert.match(await page.textContent("[role=alert]"), /Cannot reach the server/);
await browser.close();
console.log(`the page holds; screenshots are in ${values.out}`);
