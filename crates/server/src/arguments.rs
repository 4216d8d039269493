//! The command line, parsed as nginx does: single letters that may be combined (`-tq`), and values that follow directly
//! (`-c/etc/x.conf`) or as the next word.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use gale_process::Command;

use crate::directives::Form;
use crate::health::Health;
use crate::version;

/// The parsed command line.
#[derive(Debug)]
pub struct Arguments {
    /// Name that messages begin with; it also decides the default paths.
    pub program: String,
    pub action: Action,
    /// `-q`
    pub is_quiet: bool,
    /// `-g`
    pub global_directives: Option<String>,
    /// `-e`: an absolute path, or `stderr` unchanged.
    pub error_log: Option<PathBuf>,
    prefix: Option<PathBuf>,
    configuration: Option<PathBuf>,
}

#[derive(Debug, PartialEq, Eq)]
pub enum Action {
    Start,
    /// `-t` or `-T`
    Test {
        /// `-T`: print every file that was read.
        prints_texts: bool,
    },
    /// `-s`
    Signal(Command),
    /// `-h`, for the program or a command
    Help(HelpOf),
    /// `-v`
    Version,
    /// `-V`
    VersionAndBuild,
    Serve(Serve),
    Reload,
    Top(Top),
    Check(Check),
    Health(Health),
    Directives(Form),
}

/// Subject of a help text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HelpOf {
    /// The server with nginx's options.
    Program,
    Serve,
    Reload,
    Top,
    Check,
    Health,
    Directives,
}

/// `gale top [--url URL] [--interval SECONDS] [--once]`
#[derive(Debug, PartialEq, Eq)]
pub struct Top {
    /// URL of the figures; `None` means the control socket.
    pub url: Option<String>,
    /// Time between two requests.
    pub interval: Duration,
    /// Print one page of text and exit.
    pub is_once: bool,
}

/// Allowed intervals of `gale top`. The minimum bounds the load, since the server builds each response anew.
const INTERVALS: std::ops::RangeInclusive<Duration> = Duration::from_millis(100)..=Duration::from_secs(3600);

/// `gale check [FILE] [--json]`
#[derive(Debug, PartialEq, Eq)]
pub struct Check {
    pub file: PathBuf,
    /// Print the report as JSON.
    pub prints_json: bool,
}

/// `gale serve DIR [--tls] [--dashboard] [--listen ADDR] [--print-config]`
#[derive(Debug, PartialEq, Eq)]
pub struct Serve {
    pub directory: PathBuf,
    /// Address to listen on, in the syntax of `listen`.
    pub listen: String,
    /// Use TLS with a self-signed certificate, created at start.
    pub tls: bool,
    /// Serve the dashboard at /dashboard/.
    pub has_dashboard: bool,
    /// Print the configuration and exit.
    pub prints_configuration: bool,
}

/// Default listening address of `gale serve`: reachable only from this machine.
const SERVE_ADDRESS: &str = "127.0.0.1:8080";

impl Arguments {
    /// Parses the command line. An error is a complete message, ready to print.
    pub fn parse(words: impl IntoIterator<Item = OsString>) -> Result<Arguments, String> {
        let mut words = words.into_iter();
        let called = words.next().unwrap_or_default();
        let is_nginx = Path::new(&called).file_name().is_some_and(|name| name == "nginx");
        let mut arguments = Arguments {
            program: if is_nginx { "nginx" } else { "gale" }.to_owned(),
            action: Action::Start,
            is_quiet: false,
            global_directives: None,
            error_log: None,
            prefix: None,
            configuration: None,
        };
        let mut words = words.peekable();
        match words.peek().map(|word| word.as_bytes().to_vec()).as_deref() {
            Some(b"serve") if !is_nginx => {
                arguments.action = Serve::parse(words.skip(1))?;
            }
            Some(b"reload") if !is_nginx => {
                words.next();
                while let Some(word) = words.next() {
                    arguments.apply(&word, &mut words)?;
                }
                arguments.action = match arguments.action {
                    Action::Start => Action::Reload,
                    Action::Help(_) => Action::Help(HelpOf::Reload),
                    _ => return Err("gale: \"reload\" takes the options -c, -e, -g and -p".to_owned()),
                };
            }
            Some(b"top") if !is_nginx => {
                words.next();
                arguments.action = arguments.parse_top(words)?;
            }
            Some(b"check") if !is_nginx => {
                arguments.action = Check::parse(words.skip(1))?;
            }
            Some(b"health") if !is_nginx => {
                let health = Health::parse(words.skip(1))?;
                arguments.action = health.map_or(Action::Help(HelpOf::Health), Action::Health);
            }
            Some(b"directives") if !is_nginx => {
                arguments.action = parse_directives(words.skip(1))?;
            }
            _ => {
                while let Some(word) = words.next() {
                    arguments.apply(&word, &mut words)?;
                }
            }
        }
        Ok(arguments)
    }

    /// Parses the words after `top`: its own options, and those that locate the pid file.
    fn parse_top(&mut self, words: impl Iterator<Item = OsString>) -> Result<Action, String> {
        let mut words = words;
        let mut top = Top { url: None, interval: Duration::from_secs(1), is_once: false };
        while let Some(word) = words.next() {
            match word.as_bytes() {
                b"--once" => top.is_once = true,
                b"--url" => {
                    let url = words.next().and_then(|word| word.into_string().ok());
                    top.url = Some(url.ok_or("gale: option \"--url\" requires a URL")?);
                }
                b"--interval" => {
                    let seconds = words.next().and_then(|word| word.to_str()?.parse().ok());
                    let interval = seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
                    let interval = interval.filter(|interval| INTERVALS.contains(interval));
                    top.interval =
                        interval.ok_or("gale: option \"--interval\" requires a number of seconds from 0.1 to 3600")?;
                }
                _ => self.apply(&word, &mut words)?,
            }
        }
        match self.action {
            Action::Start => Ok(Action::Top(top)),
            Action::Help(_) => Ok(Action::Help(HelpOf::Top)),
            _ => Err("gale: \"top\" takes the options --url, --interval, --once, -c, -g and -p".to_owned()),
        }
    }

    /// Parses one word of options.
    fn apply(&mut self, word: &OsString, more: &mut impl Iterator<Item = OsString>) -> Result<(), String> {
        let program = self.program.clone();
        let text = word.as_bytes();
        match text {
            _ if asks_for_help(word) => return self.set(Action::Help(HelpOf::Program)),
            b"--version" => return self.set(Action::Version),
            _ => {}
        }
        let invalid = || format!("{program}: invalid option: \"{}\"", word.to_string_lossy());
        let Some(letters) = text.strip_prefix(b"-").filter(|letters| !letters.is_empty()) else {
            return Err(invalid());
        };
        for (place, letter) in letters.iter().enumerate() {
            let mut value = |what: &str| {
                let rest = &letters[place + 1..];
                let value = if rest.is_empty() { more.next() } else { Some(OsString::from_vec(rest.to_vec())) };
                value.ok_or_else(|| format!("{program}: option \"-{}\" requires {what}", char::from(*letter)))
            };
            match letter {
                b'?' | b'h' => self.set(Action::Help(HelpOf::Program))?,
                b'v' => self.set(Action::Version)?,
                b'V' => self.set(Action::VersionAndBuild)?,
                b't' => self.set(Action::Test { prints_texts: false })?,
                b'T' => self.set(Action::Test { prints_texts: true })?,
                b'q' => self.is_quiet = true,
                b'p' => {
                    self.prefix = Some(PathBuf::from(value("directory name")?));
                    return Ok(());
                }
                b'e' => {
                    self.error_log = Some(PathBuf::from(value("file name")?));
                    return Ok(());
                }
                b'c' => {
                    self.configuration = Some(PathBuf::from(value("file name")?));
                    return Ok(());
                }
                b'g' => {
                    let text = value("parameter")?.into_string();
                    self.global_directives =
                        Some(text.map_err(|_| format!("{program}: option \"-g\" requires text in UTF-8"))?);
                    return Ok(());
                }
                b's' => {
                    let name = value("parameter")?;
                    let command = name.to_str().and_then(|name| name.parse().ok());
                    let command = command
                        .ok_or_else(|| format!("{program}: invalid option: \"-s {}\"", name.to_string_lossy()))?;
                    return self.set(Action::Signal(command));
                }
                // nginx's message, which shows only the letter.
                _ => return Err(format!("{program}: invalid option: \"{}\"", char::from(*letter))),
            }
        }
        Ok(())
    }

    /// Sets the action. As in nginx, the version takes precedence over everything else, and a test over a signal.
    fn set(&mut self, action: Action) -> Result<(), String> {
        let keeps = match self.action {
            Action::Help(_) | Action::Version | Action::VersionAndBuild => true,
            Action::Test { prints_texts } => match action {
                Action::Signal(_) => true,
                Action::Test { .. } => prints_texts,
                _ => false,
            },
            _ => false,
        };
        if !keeps {
            self.action = action;
        }
        Ok(())
    }

    /// Returns `true` if the program was started as nginx.
    pub fn is_nginx(&self) -> bool {
        self.program == "nginx"
    }

    /// Directory against which relative paths in the configuration are resolved.
    pub fn prefix(&self) -> PathBuf {
        match &self.prefix {
            Some(prefix) => absolute(prefix),
            None => PathBuf::from(version::prefix(self.is_nginx())),
        }
    }

    pub fn configuration_path(&self) -> PathBuf {
        match &self.configuration {
            Some(path) if path.is_absolute() => path.clone(),
            // As in nginx, a relative path is resolved against the prefix.
            Some(path) => match &self.prefix {
                Some(_) => self.prefix().join(path),
                None => absolute(path),
            },
            None => PathBuf::from(version::configuration_path(self.is_nginx())),
        }
    }

    /// Returns the output of `-h`.
    pub fn help(&self, of: HelpOf) -> String {
        match of {
            HelpOf::Program => self.help_of_program(),
            HelpOf::Serve => SERVE_HELP.to_owned(),
            HelpOf::Reload => RELOAD_HELP.to_owned(),
            HelpOf::Top => TOP_HELP.to_owned(),
            HelpOf::Check => CHECK_HELP.to_owned(),
            HelpOf::Health => HEALTH_HELP.to_owned(),
            HelpOf::Directives => DIRECTIVES_HELP.to_owned(),
        }
    }

    fn help_of_program(&self) -> String {
        let program = &self.program;
        let own = if self.is_nginx() {
            String::new()
        } else {
            "       gale serve DIR [--tls] [--dashboard] [--listen ADDRESS] [--print-config]\n       gale reload [-c \
             filename]\n       gale top [-c filename | --url URL] [--interval SECONDS] [--once]\n       \
             gale check [FILE] [--json]\n       gale health [ADDRESS][/PATH]\n       \
             gale directives [--missing | --man | --pages DIR]\n       \
             gale serve|reload|top|check|health|directives --help\n"
                .to_owned()
        };
        format!(
            "{version}
Usage: {program} [-?hvVtTq] [-s signal] [-p prefix]
             [-e filename] [-c filename] [-g directives]
{own}
Options:
  -?,-h         : this help
  -v            : show version and exit
  -V            : show version and configure options then exit
  -t            : test configuration and exit
  -T            : test configuration, dump it and exit
  -q            : suppress non-error messages during configuration testing
  -s signal     : send signal to a master process: stop, quit, reopen, reload
  -p prefix     : set prefix path (default: {prefix}/)
  -e filename   : set error log file (default: {error_log})
  -c filename   : set configuration file (default: {configuration})
  -g directives : set global directives out of configuration file

",
            version = version::short(self.is_nginx()),
            prefix = version::prefix(self.is_nginx()),
            error_log = version::error_log_path(self.is_nginx()),
            configuration = version::configuration_path(self.is_nginx()),
        )
    }
}

impl Serve {
    fn parse(words: impl Iterator<Item = OsString>) -> Result<Action, String> {
        let mut words = words;
        let mut directory = None;
        let mut listen = SERVE_ADDRESS.to_owned();
        let (mut tls, mut has_dashboard, mut prints_configuration) = (false, false, false);
        while let Some(word) = words.next() {
            match word.as_bytes() {
                _ if asks_for_help(&word) => return Ok(Action::Help(HelpOf::Serve)),
                b"--listen" => {
                    let address = words.next().and_then(|word| word.into_string().ok());
                    listen = address.ok_or("gale: option \"--listen\" requires an address")?;
                }
                b"--tls" => tls = true,
                b"--dashboard" => has_dashboard = true,
                b"--print-config" => prints_configuration = true,
                option if option.starts_with(b"-") => {
                    return Err(format!("gale: invalid option: \"{}\"", word.to_string_lossy()));
                }
                _ if directory.is_none() => directory = Some(PathBuf::from(word)),
                _ => return Err("gale: \"serve\" takes one directory".to_owned()),
            }
        }
        let directory = directory.ok_or("gale: \"serve\" requires a directory: gale serve DIR")?;
        let directory = absolute(&directory);
        Ok(Action::Serve(Serve { directory, listen, tls, has_dashboard, prints_configuration }))
    }
}

impl Check {
    fn parse(words: impl Iterator<Item = OsString>) -> Result<Action, String> {
        let (mut file, mut prints_json) = (None, false);
        for word in words {
            match word.as_bytes() {
                _ if asks_for_help(&word) => return Ok(Action::Help(HelpOf::Check)),
                b"--json" => prints_json = true,
                option if option.starts_with(b"-") => {
                    return Err(format!("gale: invalid option: \"{}\"", word.to_string_lossy()));
                }
                _ if file.is_none() => file = Some(absolute(Path::new(&word))),
                _ => return Err("gale: \"check\" takes one file".to_owned()),
            }
        }
        let file = file.unwrap_or_else(|| PathBuf::from(version::configuration_path(true)));
        Ok(Action::Check(Check { file, prints_json }))
    }
}

fn parse_directives(words: impl Iterator<Item = OsString>) -> Result<Action, String> {
    let (mut words, mut form) = (words, Form::Text);
    while let Some(word) = words.next() {
        match word.as_bytes() {
            _ if asks_for_help(&word) => return Ok(Action::Help(HelpOf::Directives)),
            b"--missing" => form = Form::Missing,
            b"--man" => form = Form::Manual,
            b"--pages" => {
                let directory = words.next().ok_or("gale: option \"--pages\" requires a directory")?;
                form = Form::Pages(PathBuf::from(directory));
            }
            _ => return Err(format!("gale: invalid option: \"{}\"", word.to_string_lossy())),
        }
    }
    Ok(Action::Directives(form))
}

/// Returns `true` if the word requests help; it does so anywhere on the command line.
fn asks_for_help(word: &OsStr) -> bool {
    matches!(word.as_bytes(), b"-h" | b"-?" | b"--help")
}

const SERVE_HELP: &str = "\
Usage: gale serve DIR [--tls] [--dashboard] [--listen ADDRESS] [--print-config]

Serves the files of a directory until interrupted.

Options:
  -?,-h,--help      : this help
  --listen ADDRESS  : address of the \"listen\" directive (default: 127.0.0.1:8080)
  --tls             : use TLS, with a temporary self-signed certificate
  --dashboard       : serve the live dashboard at /dashboard/, only to this machine
  --print-config    : print the configuration that would be used and exit

";

const RELOAD_HELP: &str = "\
Usage: gale reload [-p prefix] [-c filename] [-e filename] [-g directives]

Reloads the configuration of the running server and waits for the result: prints errors and warnings, and
exits with 0 if the new configuration is in force, otherwise with 1. Only root and the user that started the
server may do this. (gale -s reload sends a signal and does not wait.)

Options:
  -?,-h,--help   : this help
  -p prefix      : set prefix path
  -c filename    : set configuration file, which defines the pid file
  -e filename    : set error log file
  -g directives  : set global directives out of configuration file

";

const TOP_HELP: &str = "\
Usage: gale top [-p prefix] [-c filename] [-g directives] [--url URL] [--interval SECONDS] [--once]

Shows live statistics: requests, connections, responses, times, upstream servers, caches, event loops and
thread pools. They are read over the control socket of the server, which only root and the user that started
the server may use, or from a URL. The last line lists the keys. Without a terminal, one page of text is printed.

Options:
  -?,-h,--help        : this help
  -p prefix           : set prefix path
  -c filename         : set configuration file, which defines the pid file
  -g directives       : set global directives out of configuration file
  --url URL           : URL of a location with \"api\" or \"dashboard\", http:// only
  --interval SECONDS  : refresh interval (default: 1)
  --once              : print one page of text and exit

";

const CHECK_HELP: &str = "\
Usage: gale check [FILE] [--json]

Checks an nginx configuration: reports which directives are the same in gale, which differ and how, which are
not supported, and which settings are unsafe with any server. Reads only the configuration files themselves,
so the configuration of another machine can be checked, too. The exit status is 0 if gale would accept the
configuration as far as its text shows, otherwise 1.

  FILE          : configuration file (default: /etc/nginx/nginx.conf)

Options:
  -?,-h,--help  : this help
  --json        : print the report as JSON

";

const HEALTH_HELP: &str = "\
Usage: gale health [ADDRESS][/PATH]

Checks the health of a server by an HTTP request. The exit status is 0 if it responds within five seconds with
a status below 400; otherwise it is 1, and the reason is printed.

  ADDRESS       : port of this machine, HOST:PORT or unix:FILE, with a colon before the path (default:
                  127.0.0.1:8080)
  PATH          : path of the request (default: /)

Options:
  -?,-h,--help  : this help

";

const DIRECTIVES_HELP: &str = "\
Usage: gale directives [--missing | --man | --pages DIR]

Prints the reference of all directives.

Options:
  -?,-h,--help  : this help
  --missing     : print the directives that only nginx supports
  --man         : print the manual page gale.conf(5)
  --pages DIR   : write the reference as Markdown pages to DIR

";

/// Returns the path made absolute with the current directory, without resolving links.
fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Arguments, String> {
        Arguments::parse(line.split(' ').map(OsString::from))
    }

    #[test]
    fn letters_stand_together_and_values_follow_at_once_or_next() {
        let arguments = parse("gale -tq -c/etc/x.conf -p /srv").unwrap();
        assert_eq!(arguments.action, Action::Test { prints_texts: false });
        assert!(arguments.is_quiet);
        assert_eq!(arguments.configuration_path(), Path::new("/etc/x.conf"));
        assert_eq!(arguments.prefix(), Path::new("/srv"));
        assert_eq!(parse("gale -qT").unwrap().action, Action::Test { prints_texts: true });
        assert_eq!(parse("gale -Tt").unwrap().action, Action::Test { prints_texts: true });
        // A test never sends the signal.
        for both in ["gale -t -s reload", "gale -s reload -t"] {
            assert_eq!(parse(both).unwrap().action, Action::Test { prints_texts: false });
        }
        assert_eq!(parse("gale -s reload").unwrap().action, Action::Signal(Command::Reload));
        assert_eq!(parse("gale -p /srv -c x.conf").unwrap().configuration_path(), Path::new("/srv/x.conf"));
    }

    #[test]
    fn wrong_options_are_told_in_nginx_s_words() {
        assert_eq!(parse("gale -x").unwrap_err(), "gale: invalid option: \"x\"");
        assert_eq!(parse("gale x").unwrap_err(), "gale: invalid option: \"x\"");
        assert_eq!(parse("gale -c").unwrap_err(), "gale: option \"-c\" requires file name");
        assert_eq!(parse("nginx -p").unwrap_err(), "nginx: option \"-p\" requires directory name");
        assert_eq!(parse("gale -s kill").unwrap_err(), "gale: invalid option: \"-s kill\"");
        assert_eq!(parse("gale serve").unwrap_err(), "gale: \"serve\" requires a directory: gale serve DIR");
        assert_eq!(parse("gale serve a b").unwrap_err(), "gale: \"serve\" takes one directory");
        assert!(parse("gale reload -t").unwrap_err().starts_with("gale: \"reload\" takes the options"));
        assert_eq!(parse("gale check a b").unwrap_err(), "gale: \"check\" takes one file");
        assert_eq!(parse("gale health 80 81").unwrap_err(), "gale: \"health\" takes one address");
        assert_eq!(parse("gale health x").unwrap_err(), "gale: invalid address \"x\"");
        assert_eq!(parse("gale health --x").unwrap_err(), "gale: invalid option: \"--x\"");
        assert_eq!(parse("gale check --x").unwrap_err(), "gale: invalid option: \"--x\"");
    }

    #[test]
    fn under_nginx_s_name_paths_are_debian_s_nginx_s() {
        let arguments = parse("/usr/sbin/nginx").unwrap();
        assert_eq!(arguments.configuration_path(), Path::new("/etc/nginx/nginx.conf"));
        assert_eq!(parse("gale").unwrap().configuration_path(), Path::new("/etc/gale/gale.conf"));
        assert!(parse("nginx serve .").is_err());
    }

    #[test]
    fn reload_takes_the_options_that_find_the_pid_file() {
        let arguments = parse("gale reload -c /etc/x.conf").unwrap();
        assert_eq!(arguments.action, Action::Reload);
        assert_eq!(arguments.configuration_path(), Path::new("/etc/x.conf"));
        assert_eq!(parse("gale reload --help").unwrap().action, Action::Help(HelpOf::Reload));
    }

    #[test]
    fn top_takes_an_interval_and_where_figures_are() {
        let top = |line| match parse(line).unwrap().action {
            Action::Top(top) => top,
            other => panic!("{other:?}"),
        };
        let own = top("gale top");
        assert_eq!((own.url, own.interval, own.is_once), (None, Duration::from_secs(1), false));
        let other = top("gale top -c /x --once --interval 0.5 --url http://h/api");
        assert_eq!(
            (other.url.as_deref(), other.interval.as_millis(), other.is_once),
            (Some("http://h/api"), 500, true)
        );
        for seconds in ["0", "-1", "x", "nan", "inf", "1e9", "0.01"] {
            let error = parse(&format!("gale top --interval {seconds}")).unwrap_err();
            assert!(error.contains("from 0.1 to 3600"), "{error}");
        }
        assert_eq!(parse("gale top --url").unwrap_err(), "gale: option \"--url\" requires a URL");
        assert!(parse("gale top -t").unwrap_err().starts_with("gale: \"top\" takes the options"));
        assert_eq!(parse("gale top x").unwrap_err(), "gale: invalid option: \"x\"");
        assert_eq!(parse("gale top --help").unwrap().action, Action::Help(HelpOf::Top));
        assert!(parse("nginx top").is_err());
    }

    #[test]
    fn check_takes_a_file_or_nginx_s_own() {
        let check = |line| match parse(line).unwrap().action {
            Action::Check(check) => check,
            other => panic!("{other:?}"),
        };
        let own = check("gale check");
        assert_eq!((own.file.as_path(), own.prints_json), (Path::new("/etc/nginx/nginx.conf"), false));
        let named = check("gale check --json /srv/x.conf");
        assert_eq!((named.file.as_path(), named.prints_json), (Path::new("/srv/x.conf"), true));
    }

    #[test]
    fn serve_takes_a_directory_and_an_address() {
        let Action::Serve(serve) = parse("gale serve /srv --listen 127.0.0.1:0").unwrap().action else {
            panic!("not serve");
        };
        assert_eq!((serve.directory.as_path(), serve.listen.as_str()), (Path::new("/srv"), "127.0.0.1:0"));
    }
}
