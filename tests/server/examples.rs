//! The configurations under `examples/` give the same answers on nginx and on Gale to the requests recorded beside
//! them.
//!
//! Both servers run the same text in the same folder; only the address, the names of temporary files and the driver are
//! inserted. Permitted differences: the servers' names, the time of day, compressed bytes (not their contents), and the
//! fields of a 304: Gale repeats those of the client's stored answer, nginx those of the answer without filters.

use std::fs;
use std::io::Read;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use crate::support::*;

const EXAMPLES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples");

fn the_static_site_is_the_same(driver: Driver) {
    compare("static-site", driver);
}

fn the_single_page_application_is_the_same(driver: Driver) {
    compare("single-page", driver);
}

fn the_download_server_is_the_same(driver: Driver) {
    compare("downloads", driver);
}

fn the_site_in_parts_is_the_same(driver: Driver) {
    compare("ssi-site", driver);
}

with_each_driver![
    the_static_site_is_the_same,
    the_single_page_application_is_the_same,
    the_download_server_is_the_same,
    the_site_in_parts_is_the_same,
];

/// Sends both servers every recorded request of an example.
fn compare(name: &str, driver: Driver) {
    let Some(nginx) = nginx() else {
        return skip("nginx is not installed");
    };
    let folder = Path::new(EXAMPLES).join(name);
    let text = fs::read_to_string(folder.join("nginx.conf")).expect("a configuration");
    let user = if is_root() { "user root;\n" } else { "" };
    let adapted = format!("{user}{text}").replace(&format!("/tmp/{name}"), "%DIR%/own");
    let ours = adapted
        .replace("127.0.0.1:8080", "%TCP%")
        .replace("events {", &format!("events {{\n    use {};", driver.name()))
        .replace("pid %DIR%/own.pid", "pid %DIR%/pid");
    let mut setup = Setup::configuration(&ours).argument("-p").argument("%DIR%");
    for file in files_below(&folder) {
        let path = file.strip_prefix(&folder).expect("below it").to_str().expect("text").to_owned();
        setup = setup.file(&path, fs::read(&file).expect("a file"));
    }
    let gale = setup.start();
    let theirs = gale.directory.replaced(&adapted.replace("127.0.0.1:8080", "%TCP2%"));
    gale.directory.write("theirs.conf", theirs);
    let reference = Nginx::start(&nginx, &gale.directory);
    for request in recorded(&folder, version(&nginx)) {
        let text = request.replace('\n', "\r\n") + "\r\n\r\n";
        let mut expected = normalised(gale.connect_tcp(2).ask(&text), gale.directory.address(2).to_string());
        let mut answer = normalised(gale.connect_tcp(1).ask(&text), gale.directory.address(1).to_string());
        if is_chunked(&expected) != is_chunked(&answer) {
            // The bodies must be equal, although one server has announced the length.
            forget_framing(&mut expected);
            forget_framing(&mut answer);
        }
        let (got, wanted) = (shown(&answer), shown(&expected));
        assert!(answer == expected, "{name}: {request}\n---- nginx\n{wanted}\n---- Gale\n{got}\n{gale}");
    }
    drop(reference);
    gale.stop();
}

/// Requests of an example: each begins at the start of a line, its fields are indented. Requests below a line `since
/// X.Y.Z` are left out if an older nginx answers them differently.
fn recorded(folder: &Path, version: Version) -> Vec<String> {
    let text = fs::read_to_string(folder.join("requests")).expect("recorded requests");
    let mut requests: Vec<String> = Vec::new();
    let mut is_known = true;
    for line in text.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
        if let Some(since) = line.strip_prefix("since ") {
            is_known = version >= parsed_version(since);
            continue;
        }
        if !is_known {
            continue;
        }
        match line.strip_prefix("    ") {
            Some(field) => {
                let request = requests.last_mut().expect("a request before its fields");
                if field.starts_with("Host: ") {
                    *request = request.replace("\nHost: localhost", "");
                }
                request.push('\n');
                request.push_str(field);
            }
            None => requests.push(format!("{line} HTTP/1.1\nHost: localhost")),
        }
    }
    assert!(!requests.is_empty(), "nothing is recorded");
    requests
}

/// The part of an answer that has to be the same.
fn normalised(mut response: Response, address: String) -> Response {
    let is_compressed = response.headers.iter().any(|(name, value)| name == "Content-Encoding" && value == "gzip");
    if is_compressed && response.status == 200 && !response.body.is_empty() {
        response.body = unpacked(&response.body);
    }
    for (name, value) in &mut response.headers {
        *value = value.replace(&address, "ADDRESS").replace(address.rsplit_once(':').expect("a port").1, "PORT");
        if matches!(name.as_str(), "Server" | "Date" | "Expires") {
            *value = "…".to_owned();
        }
        if name == "Content-Length" && response.status >= 300 {
            // Length of a page with the server's name.
            *value = "…".to_owned();
        }
    }
    if response.status == 304 {
        response.headers.retain(|(name, _)| !matches!(name.as_str(), "ETag" | "Vary"));
    }
    if let Some(boundary) = boundary(&response) {
        let replaced = |text: &str| text.replace(&boundary, "BOUNDARY");
        response.headers.iter_mut().for_each(|(_, value)| *value = replaced(value));
        response.body = replaced(&String::from_utf8_lossy(&response.body)).into_bytes();
    }
    response.headers.sort();
    if response.status >= 300 {
        response.body = String::from_utf8_lossy(&response.body).replace("nginx", "gale").into_bytes();
    }
    response
}

/// Boundary between the parts of several ranges.
fn boundary(response: &Response) -> Option<String> {
    let (_, value) = response.headers.iter().find(|(name, _)| name == "Content-Type")?;
    value.split_once("boundary=").map(|(_, boundary)| boundary.to_owned())
}

fn is_chunked(response: &Response) -> bool {
    response.headers.iter().any(|(name, _)| name == "Transfer-Encoding")
}

fn forget_framing(response: &mut Response) {
    response.headers.retain(|(name, _)| name != "Transfer-Encoding" && name != "Content-Length");
}

fn shown(response: &Response) -> String {
    let fields: String = response.headers.iter().map(|(name, value)| format!("{name}: {value}\n")).collect();
    format!("{} {}\n{fields}\n{}", response.status, response.reason, String::from_utf8_lossy(&response.body))
}

fn unpacked(bytes: &[u8]) -> Vec<u8> {
    let mut unpacked = Vec::new();
    flate2::read::GzDecoder::new(bytes).read_to_end(&mut unpacked).expect("gzip");
    unpacked
}

fn files_below(folder: &Path) -> Vec<std::path::PathBuf> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            files.extend(files_below(&path));
        } else {
            files.push(path);
        }
    }
    files
}

/// Path of nginx, where it is installed: `GALE_TEST_NGINX`, or that in PATH.
fn nginx() -> Option<std::path::PathBuf> {
    if let Some(named) = std::env::var_os("GALE_TEST_NGINX") {
        return Some(named.into());
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let places = std::env::split_paths(&path).chain(["/usr/sbin".into(), "/usr/local/nginx/sbin".into()]);
    places.map(|place| place.join("nginx")).find(|program| program.is_file())
}

type Version = (u32, u32, u32);

/// Version printed by `nginx -v`.
fn version(program: &Path) -> Version {
    let output = Command::new(program).arg("-v").output().expect("nginx starts");
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    parsed_version(text.trim().rsplit('/').next().unwrap_or_default())
}

fn parsed_version(text: &str) -> Version {
    let mut numbers = text.split(|c: char| !c.is_ascii_digit()).map(|number| number.parse().unwrap_or(0));
    let mut next = || numbers.next().unwrap_or(0);
    (next(), next(), next())
}

/// A running nginx; ended when dropped.
struct Nginx(Child);

impl Nginx {
    #[track_caller]
    fn start(program: &Path, directory: &Directory) -> Nginx {
        let child = Command::new(program)
            .arg("-p")
            .arg(directory.path())
            .args(["-e", "theirs.log", "-c", "theirs.conf"])
            .stdin(Stdio::null())
            .stderr(directory.create("theirs.err"))
            .spawn()
            .expect("nginx starts");
        let nginx = Nginx(child);
        // The pid file is written when the sockets listen.
        directory.wait_until("nginx", |directory| {
            directory.try_read("own.pid").is_some_and(|pid| pid.trim() == nginx.0.id().to_string())
        });
        nginx
    }
}

impl Drop for Nginx {
    fn drop(&mut self) {
        let pid = rustix::process::Pid::from_child(&self.0);
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        let _ = self.0.wait();
    }
}
