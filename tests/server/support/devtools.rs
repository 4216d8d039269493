//! A browser controlled by a test: Chromium's DevTools protocol over a pair of pipes.
//! <https://chromedevtools.github.io/devtools-protocol/>

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use serde_json::{Value, json};

use crate::support::Directory;

/// Ends a test that hangs.
const DEADLINE: Duration = Duration::from_secs(120);

/// A page in a browser, which is closed with it.
pub struct Page {
    child: Child,
    commands: ChildStdin,
    /// Messages in the order of their arrival.
    messages: Receiver<Value>,
    session: String,
    commands_sent: u64,
    directory: Directory,
}

impl Page {
    /// Opens this URL in a browser. Fails if the browser does not work.
    pub fn open(browser: &Path, url: &str) -> Result<Page, String> {
        let directory = Directory::new();
        // The browser reads commands from descriptor 3 and answers on 4.
        let mut child = Command::new("sh")
            .args(["-c", "exec \"$0\" \"$@\" 3<&0 4>&1 </dev/null >/dev/null"])
            .arg(browser)
            .args(["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"])
            .args(["--disable-background-networking", "--disable-component-update", "--disable-sync"])
            .args(["--remote-debugging-pipe", "--force-prefers-reduced-motion"])
            .arg(format!("--user-data-dir={}", directory.path().join("profile").display()))
            .env("HOME", directory.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(directory.create("console"))
            .spawn()
            .map_err(|error| format!("the browser does not start: {error}"))?;
        let commands = child.stdin.take().expect("a pipe");
        let mut answers = BufReader::new(child.stdout.take().expect("a pipe"));
        let (sender, messages) = channel();
        std::thread::spawn(move || {
            let mut text = Vec::new();
            while answers.read_until(0, &mut text).is_ok_and(|length| length > 0) {
                let message = serde_json::from_slice(text.strip_suffix(b"\0").unwrap_or(&text)).unwrap_or(Value::Null);
                if sender.send(message).is_err() {
                    return;
                }
                text.clear();
            }
        });
        let mut page = Page { child, commands, messages, session: String::new(), commands_sent: 0, directory };
        let target = page.try_call("Target.createTarget", &json!({ "url": "about:blank" }))?;
        let attach = json!({ "targetId": target["targetId"], "flatten": true });
        let session = page.try_call("Target.attachToTarget", &attach)?;
        page.session = session["sessionId"].as_str().unwrap_or_default().to_owned();
        page.try_call("Page.enable", &json!({}))?;
        page.try_call("Page.navigate", &json!({ "url": url }))?;
        Ok(page)
    }

    /// Calls a method of the protocol and returns its result.
    #[track_caller]
    pub fn call(&mut self, method: &str, parameters: &Value) -> Value {
        self.try_call(method, parameters).unwrap_or_else(|error| panic!("{method}: {error}"))
    }

    fn try_call(&mut self, method: &str, parameters: &Value) -> Result<Value, String> {
        self.commands_sent += 1;
        let mut command = json!({ "id": self.commands_sent, "method": method, "params": parameters });
        if !self.session.is_empty() {
            command["sessionId"] = self.session.as_str().into();
        }
        let sent = self.commands.write_all(format!("{command}\0").as_bytes());
        sent.map_err(|error| format!("{error}: {}", self.directory.read("console")))?;
        loop {
            // Events are ignored.
            let message = self.messages.recv_timeout(DEADLINE);
            let message = message.map_err(|_| format!("no answer: {}", self.directory.read("console")))?;
            if message["id"] == self.commands_sent {
                return match message.get("error") {
                    Some(error) => Err(error.to_string()),
                    None => Ok(message["result"].clone()),
                };
            }
        }
    }

    /// Evaluates an expression in the page; a promise is awaited.
    #[track_caller]
    pub fn evaluate(&mut self, expression: &str) -> Value {
        let parameters = json!({ "expression": expression, "awaitPromise": true, "returnByValue": true });
        let answer = self.call("Runtime.evaluate", &parameters);
        assert!(answer.get("exceptionDetails").is_none(), "{expression}: {answer:#}");
        answer["result"]["value"].clone()
    }

    /// Waits until an expression is true; it is evaluated with every frame.
    #[track_caller]
    pub fn wait_until(&mut self, expression: &str) {
        self.evaluate(&format!(
            "new Promise((resolve) => {{
               const look = () => (({expression}) ? resolve(true) : requestAnimationFrame(look));
               look();
             }})"
        ));
    }

    /// Presses and releases a key. `text` is the text that the key enters, if any.
    #[track_caller]
    pub fn press(&mut self, key: &str, code: u32, text: &str) {
        let event = |kind: &str| {
            let mut event = json!({ "type": kind, "key": key, "windowsVirtualKeyCode": code });
            if kind == "keyDown" && !text.is_empty() {
                event["text"] = text.into();
            }
            event
        };
        self.call("Input.dispatchKeyEvent", &event("keyDown"));
        self.call("Input.dispatchKeyEvent", &event("keyUp"));
    }

    /// Presses Tab until the focused element has this label.
    #[track_caller]
    pub fn tab_to(&mut self, label: &str) {
        const STEPS_MAX: usize = 200;
        for _ in 0..STEPS_MAX {
            self.press("Tab", 9, "");
            if self.evaluate("document.activeElement?.getAttribute('aria-label') ?? ''") == label {
                return;
            }
        }
        panic!("nothing called \"{label}\" can be reached by keyboard");
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        self.child.kill().expect("it is ours");
        self.child.wait().expect("it is ours");
    }
}
