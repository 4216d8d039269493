//! interpreter: backends for FastCGI and uwsgi: PHP-FPM and uWSGI, each with an application that answers `ok`.
//!
//! They are in Debian's packages `php-fpm` and `uwsgi-plugin-python3`. If one is missing, its case is left out.

use std::fs;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use gale_protocol::gateway::ParamsWriter;
use gale_protocol::{fastcgi, uwsgi};

use rustix::process::{Pid, Signal, kill_process_group};

use crate::process;
use crate::servers::{POLL_INTERVAL, SMALL_BODY};

const START_TIME_LIMIT: Duration = Duration::from_secs(10);
/// Worker processes, each of which handles one request at a time.
const PROCESSES: u32 = 4;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Language {
    Php,
    Python,
}

/// A running backend. It is stopped on drop.
#[derive(Debug)]
pub struct Interpreter {
    language: Language,
    directory: PathBuf,
    child: Child,
}

impl Interpreter {
    /// Starts it on this core. Returns `None` if it is not installed.
    pub fn start(language: Language, core: usize) -> Result<Option<Interpreter>, String> {
        let Some(binary) = language.binary() else {
            return Ok(None);
        };
        let directory = std::env::temp_dir().join(format!("gale-bench-{}-{language:?}", std::process::id()));
        let fault = |error: std::io::Error| format!("{}: {error}", directory.display());
        fs::create_dir_all(&directory).map_err(fault)?;
        let text = String::from_utf8_lossy(SMALL_BODY);
        let mut command = Command::new(binary);
        let path = |name: &str| directory.join(name).display().to_string();
        match language {
            Language::Php => {
                fs::write(path("answer.php"), format!("<?php echo '{text}';")).map_err(fault)?;
                let pool = format!(
                    "[global]\nerror_log = {}\ndaemonize = no\n[bench]\nlisten = {}\nuser = root\ngroup = root\n\
                     listen.backlog = 4096\npm = static\npm.max_children = {PROCESSES}\n",
                    path("log"),
                    path("socket")
                );
                fs::write(path("fpm.conf"), pool).map_err(fault)?;
                command.args(["-n", "-F", "-R", "-y", &path("fpm.conf")]);
            }
            Language::Python => {
                let application = format!(
                    "def application(environment, start):\n    \
                     start('200 OK', [('Content-Type', 'text/plain'), ('Content-Length', '{}')])\n    \
                     return [b'{text}']\n",
                    SMALL_BODY.len()
                );
                fs::write(path("answer.py"), application).map_err(fault)?;
                command.args(["--plugin", "python3", "--master", "--die-on-term", "--disable-logging"]);
                command.args(["--listen", "100", "--processes", &PROCESSES.to_string()]);
                command.args(["--uwsgi-socket", &path("socket"), "--wsgi-file", &path("answer.py")]);
            }
        }
        let output = fs::File::create(directory.join("output")).map_err(fault)?;
        command.stdin(Stdio::null()).stdout(output.try_clone().map_err(fault)?).stderr(output);
        std::os::unix::process::CommandExt::process_group(&mut command, 0);
        let child = process::spawn_pinned(&mut command, &[core])?;
        let started = Interpreter { language, directory, child };
        let deadline = Instant::now() + START_TIME_LIMIT;
        while UnixStream::connect(started.socket()).is_err() {
            if Instant::now() >= deadline {
                let output = fs::read_to_string(started.directory.join("output")).unwrap_or_default();
                return Err(format!("{language:?} does not listen\n{output}"));
            }
            std::thread::sleep(POLL_INTERVAL);
        }
        Ok(Some(started))
    }

    fn socket(&self) -> PathBuf {
        self.directory.join("socket")
    }

    /// Returns the location for nginx and Gale that proxies to it.
    pub fn location(&self, path: &str) -> String {
        let module = self.language.module();
        let socket = self.socket();
        let params: String =
            self.params().iter().map(|(name, value, _)| format!("{module}_param {name} {value}; ")).collect();
        format!("location = {path} {{ {module}_pass unix:{}; {params}}}", socket.display())
    }

    /// Returns the socket and a file with an encoded request, for the floor.
    pub fn for_floor(&self) -> Result<OneRequest, String> {
        let mut bytes = Vec::new();
        let fault = |error: &dyn std::fmt::Display| format!("the floor's request: {error}");
        let params = self.params();
        let write_all = |params_out: &mut dyn ParamsWriter| {
            params.iter().try_for_each(|(name, _, value)| params_out.push(name.as_bytes(), value.as_bytes()))
        };
        match self.language {
            Language::Php => {
                fastcgi::write_begin_request(&mut bytes, false);
                let mut out = fastcgi::Params::new(&mut bytes);
                write_all(&mut out).map_err(|error| fault(&error))?;
                out.finish();
                bytes.extend_from_slice(&fastcgi::STDIN_END);
            }
            Language::Python => {
                let mut out = uwsgi::Params::new(&mut bytes, 0, 0);
                write_all(&mut out).map_err(|error| fault(&error))?;
                out.finish();
            }
        }
        let file = self.directory.join("request");
        fs::write(&file, bytes).map_err(|error| fault(&error))?;
        Ok(OneRequest { socket: self.socket(), file })
    }

    /// Returns the parameters of a request: name, value in the configuration, and value for a request of wrk.
    fn params(&self) -> Vec<(&'static str, String, String)> {
        let script = self.directory.join("answer.php").display().to_string();
        let mut params = vec![];
        let mut add = |name, value: &str, example: &str| params.push((name, value.to_owned(), example.to_owned()));
        match self.language {
            Language::Php => {
                add("SCRIPT_FILENAME", &script, &script);
                add("SCRIPT_NAME", "$fastcgi_script_name", "/fastcgi");
                add("DOCUMENT_URI", "$document_uri", "/fastcgi");
                add("GATEWAY_INTERFACE", "CGI/1.1", "CGI/1.1");
                add("SERVER_ADDR", "$server_addr", "127.0.0.1");
            }
            Language::Python => add("PATH_INFO", "$document_uri", "/uwsgi"),
        }
        add("QUERY_STRING", "$query_string", "");
        add("REQUEST_METHOD", "$request_method", "GET");
        add("CONTENT_TYPE", "$content_type", "");
        add("CONTENT_LENGTH", "$content_length", "");
        add("REQUEST_URI", "$request_uri", &format!("/{}", self.language.module()));
        add("DOCUMENT_ROOT", "$document_root", "/tmp/gale-bench-00000/html");
        add("SERVER_PROTOCOL", "$server_protocol", "HTTP/1.1");
        add("REQUEST_SCHEME", "$scheme", "http");
        add("REMOTE_ADDR", "$remote_addr", "127.0.0.1");
        add("REMOTE_PORT", "$remote_port", "50000");
        add("SERVER_PORT", "$server_port", "50000");
        add("SERVER_NAME", "$server_name", "");
        params
    }
}

/// A backend that gets a constant request over a new connection each time.
#[derive(Debug, Clone)]
pub struct OneRequest {
    pub socket: PathBuf,
    pub file: PathBuf,
}

impl Language {
    /// Returns the prefix of its directives.
    fn module(self) -> &'static str {
        match self {
            Language::Php => "fastcgi",
            Language::Python => "uwsgi",
        }
    }

    fn binary(self) -> Option<PathBuf> {
        let is_it = |name: &str| match self {
            Language::Php => name.starts_with("php-fpm"),
            Language::Python => name == "uwsgi",
        };
        let found = |folder: &str| {
            let mut entries: Vec<PathBuf> =
                fs::read_dir(folder).into_iter().flatten().flatten().map(|e| e.path()).collect();
            entries.sort();
            entries
                .into_iter()
                .find(|path: &PathBuf| path.file_name().and_then(|name| name.to_str()).is_some_and(is_it))
        };
        ["/usr/sbin", "/usr/bin"].into_iter().filter(|folder| Path::new(folder).is_dir()).find_map(found)
    }
}

impl Drop for Interpreter {
    fn drop(&mut self) {
        if let Some(group) = Pid::from_raw(self.child.id() as i32) {
            // Its workers are in its process group. They may have exited already.
            let _ = kill_process_group(group, Signal::KILL);
        }
        let _ = self.child.wait();
        let _ = fs::remove_dir_all(&self.directory);
    }
}
