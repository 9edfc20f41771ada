// Server-sent events, and an API key with each request: the browser's own EventSource sends none.

const NAME = "kvroute-key"; // kept by the browser for this tab only, never in an address

export class Refused extends Error {
  constructor(status) {
    super(`refused with ${status}`);
    this.status = status;
  }
}

/** Keeps a key; what cannot be sent is none. */
export const setKey = (key) => sessionStorage.setItem(NAME, /^[!-~]+$/.test(key) ? key : "invalid");

/** Whether a key was given. */
export const hasKey = () => Boolean(sessionStorage.getItem(NAME));

/** The response; with the key, if one was given. */
export async function ask(url, options = {}) {
  const key = sessionStorage.getItem(NAME);
  const headers = key ? { authorization: `Bearer ${key}` } : {};
  const answer = await fetch(url, { ...options, headers });
  if (!answer.ok) throw new Refused(answer.status);
  return answer;
}

/** Calls take(name, data) for each event, until the stream ends. */
export async function follow(url, signal, take) {
  const answer = await ask(url, { signal, cache: "no-store" });
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (text + value).split("\n\n");
    text = events.pop();
    for (const event of events) {
      const [, name, data] = event.match(/^event: (.*)\ndata: (.*)$/);
      take(name, JSON.parse(data));
    }
  }
}
