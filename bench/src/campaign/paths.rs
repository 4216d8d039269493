//! paths: requests that try to leave their root, and every file that the server opens meanwhile.
//!
//! strace names the file behind each descriptor that open(2) and its relatives give. It does not see opens that a ring
//! makes; for those the bytes of the answers decide, which hold a word that stands in no file below the roots.

use std::collections::BTreeSet;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::Experiment;
use super::exchange::ask;
use super::isolation::Need;
use super::origin::{Origin, Then};
use super::outcome::{Outcome, Tally};
use super::trial::{Trial, text, wait_until};
use crate::process::Process;
use crate::servers::Setting;

pub const EXPERIMENT: Experiment = Experiment {
    name: "paths",
    does: "Dot segments, encoded and double encoded, NUL, backslashes and overlong UTF-8 in targets, in Destination of \
           COPY and MOVE and in X-Accel-Redirect, under a root, an alias, try_files, disable_symlinks and DAV; strace \
           names each file that the server opens.",
    holds: "No file outside the roots is opened, changed or told.",
    needs: &[Need::Strace],
    not_on_nginx: None,
    run,
};

const SECRET: &str = "a word that stands in no file below the roots";
const LIMIT: Duration = Duration::from_secs(10);

/// Ends of targets; `S` stands for the way to a secret.
const STEPS: [&str; 16] = [
    "../S",
    "%2e%2e/S",
    "..%2fS",
    "%2e%2e%2fS",
    ".%2e/S",
    "..%5cS",
    "..\\S",
    "%252e%252e/S",
    "..%00/S",
    "..;/S",
    "%c0%ae%c0%ae/S",
    "./../S",
    "x/../../S",
    "..//S",
    "...//S",
    "%2e%2e%2f%2e%2e%2fS",
];
const SECRETS: [&str; 3] = ["secret", "outside/secret", "../../../../../../../../etc/passwd"];
const PREFIXES: [&str; 7] = ["/", "//", "/alias/", "/try/", "/links/", "/dav/", "/accel/"];

fn run(trial: &Trial) -> Result<Outcome, String> {
    let site = trial.folder("site")?;
    build(&site).map_err(|error| format!("{}: {error}", site.display()))?;
    let origin = Origin::start(|request, stream| {
        let to = request.target.strip_prefix("/accel").unwrap_or("/");
        let head =
            format!("HTTP/1.1 200 OK\r\nX-Accel-Redirect: {to}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
        let _ = stream.write_all(head.as_bytes());
        Then::Close
    })?;
    let watched = trial.start(setting(&site, &origin))?;
    let before = listing(&site);
    let opens = site.join("opens");
    let tracer = Tracer::attach(&watched.server.root.tree(), &opens)?;
    let tally = Tally::default();
    for request in requests() {
        let begun = Instant::now();
        let shown = String::from_utf8_lossy(&request).lines().next().unwrap_or_default().to_owned();
        match ask(watched.address(), &request, LIMIT) {
            Ok(reply) if holds_secret(&reply.body) => tally.wrong(format!("{shown} is answered with a secret")),
            // Any status will do.
            Ok(_) => tally.answered(begun),
            Err(error) => tally.lost(format!("{shown}: {error}")),
        }
    }
    drop(tracer);
    let mut allowed = ["root", "alias", "dav", "temp"].map(|name| site.join(name)).to_vec();
    allowed.push(watched.server.directory().to_owned());
    let traced = fs::read_to_string(&opens).unwrap_or_default();
    let escapes = escapes(&traced, &allowed);
    let opened = traced.lines().filter_map(opened_path).count();
    fs::remove_file(&opens).map_err(|error| error.to_string())?;
    let mut outcome = watched.finish(&tally);
    outcome.check(escapes.is_empty(), format!("opened: {}", Vec::from_iter(escapes).join(", ")));
    outcome.check(before == listing(&site), "files outside the roots have changed");
    outcome.notes.push(format!("{opened} opens seen"));
    Ok(outcome)
}

fn build(site: &Path) -> std::io::Result<()> {
    for name in ["root/x", "alias", "dav", "outside", "root/accel"] {
        fs::create_dir_all(site.join(name))?;
    }
    fs::write(site.join("secret"), SECRET)?;
    fs::write(site.join("outside/secret"), SECRET)?;
    fs::write(site.join("dav/file"), "a file")?;
    std::os::unix::fs::symlink(site.join("outside"), site.join("root/links"))
}

fn setting(site: &Path, origin: &Origin) -> Setting {
    let site = text(site);
    Setting {
        http: format!("client_body_temp_path {site}/temp;"),
        server: format!(
            "location /alias/ {{ alias {site}/alias/; autoindex on; }}
             location /try/ {{ root {site}/root; try_files $uri $uri/ /file; }}
             location /links/ {{ root {site}/root; disable_symlinks on; }}
             location /dav/ {{ root {site}; dav_methods PUT DELETE MKCOL COPY MOVE; create_full_put_path on; }}
             location /accel/ {{ proxy_pass http://{}; }}",
            origin.address
        ),
        ..Setting::default()
    }
}

fn requests() -> Vec<Vec<u8>> {
    let fields = "Host: campaign\r\nConnection: close\r\n";
    let mut requests = Vec::new();
    for step in STEPS.iter().flat_map(|step| SECRETS.map(|secret| step.replace('S', secret))) {
        for prefix in PREFIXES {
            requests.push(format!("GET {prefix}{step} HTTP/1.1\r\n{fields}\r\n").into_bytes());
        }
        for method in ["DELETE", "MKCOL"] {
            requests.push(format!("{method} /dav/{step} HTTP/1.1\r\n{fields}\r\n").into_bytes());
        }
        requests.push(format!("PUT /dav/{step} HTTP/1.1\r\n{fields}Content-Length: 1\r\n\r\nx").into_bytes());
        for method in ["COPY", "MOVE"] {
            let to = format!("Destination: http://campaign/dav/{step}\r\n");
            requests.push(format!("{method} /dav/file HTTP/1.1\r\n{fields}{to}\r\n").into_bytes());
        }
    }
    requests.push(format!("GET /links/secret HTTP/1.1\r\n{fields}\r\n").into_bytes());
    requests
}

fn holds_secret(body: &[u8]) -> bool {
    let text = String::from_utf8_lossy(body);
    text.contains(SECRET) || text.contains("root:x:0:0")
}

/// Names and contents of the files outside the roots.
fn listing(site: &Path) -> BTreeSet<(PathBuf, Vec<u8>)> {
    let files = |folder: PathBuf| fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    let outside = files(site.to_owned()).chain(files(site.join("outside")));
    outside.map(|path| (path.clone(), fs::read(&path).unwrap_or_default())).collect()
}

/// Files that were opened and lie elsewhere.
fn escapes(traced: &str, allowed: &[PathBuf]) -> BTreeSet<String> {
    const SYSTEM: [&str; 6] = ["/proc", "/sys", "/dev", "/etc/localtime", "/usr/share/zoneinfo", "/usr/lib"];
    let is_allowed = |path: &str| {
        // A server that goes down to a file step by step opens the folders above its root, too.
        let is_ours = allowed.iter().any(|root| Path::new(path).starts_with(root) || root.starts_with(path));
        is_ours || SYSTEM.iter().any(|root| Path::new(path).starts_with(root))
    };
    traced.lines().filter_map(opened_path).filter(|path| !is_allowed(path)).map(str::to_owned).collect()
}

/// `… = 7</path>` of a line of strace: the file behind the new descriptor.
fn opened_path(line: &str) -> Option<&str> {
    let (_, result) = line.rsplit_once(" = ")?;
    let (number, path) = result.split_once('<')?;
    number.parse::<u32>().ok()?;
    path.strip_suffix('>').filter(|path| path.starts_with('/'))
}

/// strace on all threads of some processes; it detaches when dropped.
struct Tracer(Child);

impl Tracer {
    fn attach(processes: &[Process], output: &Path) -> Result<Tracer, String> {
        let mut command = Command::new("strace");
        command.args(["-f", "-y", "-qq", "-e", "trace=open,openat,openat2", "-e", "signal=none", "-o"]).arg(output);
        command.args(processes.iter().flat_map(|process| ["-p".to_owned(), process.id.to_string()]));
        command.stdin(Stdio::null()).stderr(Stdio::null());
        let tracer = Tracer(command.spawn().map_err(|error| format!("strace: {error}"))?);
        let is_traced = |process: &Process| {
            let tasks = fs::read_dir(format!("/proc/{}/task", process.id)).into_iter().flatten().flatten();
            let mut statuses = tasks.filter_map(|task| fs::read_to_string(task.path().join("status")).ok());
            statuses.all(|status| !status.contains("TracerPid:\t0\n"))
        };
        match wait_until(LIMIT, || processes.iter().all(is_traced)) {
            true => Ok(tracer),
            false => Err("strace does not attach".to_owned()),
        }
    }
}

impl Drop for Tracer {
    fn drop(&mut self) {
        if let Some(id) = rustix::process::Pid::from_raw(self.0.id() as i32) {
            let _ = rustix::process::kill_process(id, rustix::process::Signal::INT);
        }
        let _ = self.0.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_strace_name_the_file_behind_the_descriptor() {
        let line = "12 openat(AT_FDCWD</>, \"/a/link\", O_RDONLY|O_CLOEXEC) = 7</b/file>";
        assert_eq!(opened_path(line), Some("/b/file"));
        assert_eq!(
            opened_path("12 openat(AT_FDCWD</>, \"/a\", O_RDONLY) = -1 ENOENT (No such file or directory)"),
            None
        );
        assert_eq!(escapes(line, &[PathBuf::from("/a")]).len(), 1);
        assert!(escapes(line, &[PathBuf::from("/b")]).is_empty());
    }
}
