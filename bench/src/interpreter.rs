//! interpreter: the programs behind FastCGI and uwsgi: PHP-FPM and uWSGI, each with an application that answers `ok`.
//!
//! They are Debian's packages `php-fpm` and `uwsgi-plugin-python3`; where one is missing, its case is left out.

use std::fs;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process_group};

use crate::process;
use crate::servers::{POLL_INTERVAL, SMALL_BODY};

const START_TIME_LIMIT: Duration = Duration::from_secs(10);
/// Requests that are worked on at once.
const PROCESSES: u32 = 4;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Language {
    Php,
    Python,
}

/// A started program. It is ended when this is dropped.
#[derive(Debug)]
pub struct Interpreter {
    language: Language,
    directory: PathBuf,
    child: Child,
}

impl Interpreter {
    /// Starts it on that core; `None` where it is not installed.
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

    /// The location that asks it, for nginx and Gale.
    pub fn location(&self, path: &str) -> String {
        let (directory, socket) = (self.directory.display(), self.socket());
        let socket = socket.display();
        match self.language {
            Language::Php => format!(
                "location = {path} {{ fastcgi_pass unix:{socket}; fastcgi_param SCRIPT_FILENAME {directory}/answer.php; \
                 fastcgi_param QUERY_STRING $query_string; fastcgi_param REQUEST_METHOD $request_method; \
                 fastcgi_param CONTENT_TYPE $content_type; fastcgi_param CONTENT_LENGTH $content_length; \
                 fastcgi_param SCRIPT_NAME $fastcgi_script_name; fastcgi_param REQUEST_URI $request_uri; \
                 fastcgi_param DOCUMENT_URI $document_uri; fastcgi_param DOCUMENT_ROOT $document_root; \
                 fastcgi_param SERVER_PROTOCOL $server_protocol; fastcgi_param REQUEST_SCHEME $scheme; \
                 fastcgi_param GATEWAY_INTERFACE CGI/1.1; fastcgi_param REMOTE_ADDR $remote_addr; \
                 fastcgi_param REMOTE_PORT $remote_port; fastcgi_param SERVER_ADDR $server_addr; \
                 fastcgi_param SERVER_PORT $server_port; fastcgi_param SERVER_NAME $server_name; }}"
            ),
            Language::Python => format!(
                "location = {path} {{ uwsgi_pass unix:{socket}; uwsgi_param QUERY_STRING $query_string; \
                 uwsgi_param REQUEST_METHOD $request_method; uwsgi_param CONTENT_TYPE $content_type; \
                 uwsgi_param CONTENT_LENGTH $content_length; uwsgi_param REQUEST_URI $request_uri; \
                 uwsgi_param PATH_INFO $document_uri; uwsgi_param DOCUMENT_ROOT $document_root; \
                 uwsgi_param SERVER_PROTOCOL $server_protocol; uwsgi_param REQUEST_SCHEME $scheme; \
                 uwsgi_param REMOTE_ADDR $remote_addr; uwsgi_param REMOTE_PORT $remote_port; \
                 uwsgi_param SERVER_PORT $server_port; uwsgi_param SERVER_NAME $server_name; }}"
            ),
        }
    }
}

impl Language {
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
            // Its workers are in its group; they may have ended by themselves.
            let _ = kill_process_group(group, Signal::KILL);
        }
        let _ = self.child.wait();
        let _ = fs::remove_dir_all(&self.directory);
    }
}
