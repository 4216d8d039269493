//! Chromium, where it is installed: the state of a page after its scripts have run.

use std::io::Read;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc;

use super::{DEADLINE, Directory};

/// Path of a working browser. A package may install a stub that only says where to get the browser.
pub fn browser() -> Option<&'static Path> {
    let paths = ["/usr/bin/chromium", "/usr/bin/chromium-browser", "/usr/bin/google-chrome"];
    let shows_a_page = |path: &&Path| look(path, "about:blank", &[]).is_ok_and(|(page, _)| page.contains("<html"));
    paths.into_iter().map(Path::new).filter(|path| path.exists()).find(shows_a_page)
}

/// Returns the page after some time and the console's messages, or the browser's own error.
pub fn look(browser: &Path, url: &str, options: &[&str]) -> Result<(String, String), String> {
    let directory = Directory::new();
    let mut child = Command::new(browser)
        .args([
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--disable-quic",
            "--no-first-run",
        ])
        .args(["--disable-background-networking", "--disable-component-update", "--disable-sync"])
        .args(["--enable-logging=stderr", "--virtual-time-budget=5000", "--dump-dom"])
        .arg(format!("--user-data-dir={}", directory.path().join("profile").display()))
        .args(options)
        .arg(url)
        .env("HOME", directory.path())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(directory.create("console"))
        .spawn()
        .map_err(|error| format!("the browser does not start: {error}"))?;
    let mut stdout = child.stdout.take().expect("a pipe");
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        let mut page = Vec::new();
        let read = stdout.read_to_end(&mut page).map(|_| String::from_utf8_lossy(&page).into_owned());
        // The receiver is gone if the browser hung.
        let _ = sender.send(read);
    });
    let page = receiver.recv_timeout(DEADLINE);
    if page.is_err() {
        child.kill().expect("it is ours");
    }
    child.wait().expect("it is ours");
    let console = directory.read("console");
    match page {
        Ok(page) => Ok((page.expect("a pipe can be read"), console)),
        Err(_) => Err(format!("the browser hangs: {console}")),
    }
}
