//! options: what is measured, with which binaries, for how long.
//!
//! A server whose binary is not there is left out with a note, unless it was asked for by name.

use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::servers::{Kind, Program};

pub const USAGE: &str = "\
usage: cargo xtask bench MEASUREMENT [OPTION…]

  cpu        CPU time per request: keep-alive, a 1 KiB file, short connections; all servers in turn
  syscalls   system calls per request
  reload     many reloads in a row under load, every answer checked; memory before and after
  respawn    the worker process killed under load; time until served again
  all        the four of them

  --nginx PATH | --gale PATH | --h2o PATH | --haproxy PATH
                         the binaries (default: from PATH; gale: target/release/gale)
  --server LABEL=KIND:PATH
                         one more server; KIND: nginx, gale, h2o, haproxy. May be repeated
  --gale-use A,B         measure gale once per driver, with `use A;` in events (epoll, io_uring)
  --servers A,B          only those labels (default: all that are there; for reload and respawn: gale)
  --cases A,B            cpu, syscalls: return, file, short (default: all)
  --connections N[,N]    keep-alive connections (default: 128)
  --short-connections N  connections of the short case (default: 64)
  --rounds N             cpu: 5; respawn: 5
  --seconds S            one run of cpu or syscalls (default: 4)
  --server-core N, --client-core N
                         where server and client are pinned (default: 0 and 1)
  --reloads N            default: 1000
  --keepalive-clients N, --short-clients N
                         threads of the load under reload and respawn (default: 8 and 4)
  --results DIR          Markdown and JSON go there (default: bench/results)
";

#[derive(Debug)]
pub struct Options {
    /// The floor first, then the others in the order in which they are measured.
    pub programs: Vec<Program>,
    /// Labels given with --servers.
    pub chosen: Option<Vec<String>>,
    pub cases: Option<Vec<String>>,
    pub connections: Vec<u32>,
    pub short_connections: u32,
    pub rounds: u32,
    pub run_time: Duration,
    pub server_core: usize,
    pub client_core: usize,
    pub reloads: u32,
    pub keepalive_clients: usize,
    pub short_clients: usize,
    pub results: PathBuf,
}

impl Options {
    pub fn parse(args: &[String]) -> Result<Options, String> {
        let bench = Path::new(env!("CARGO_MANIFEST_DIR"));
        let mut options = Options {
            programs: Vec::new(),
            chosen: None,
            cases: None,
            connections: vec![128],
            short_connections: 64,
            rounds: 5,
            run_time: Duration::from_secs(4),
            server_core: 0,
            client_core: 1,
            reloads: 1000,
            keepalive_clients: 8,
            short_clients: 4,
            results: bench.join("results"),
        };
        let mut nginx = PathBuf::from("nginx");
        let mut gale = bench.join("../target/release/gale");
        let mut h2o = PathBuf::from("h2o");
        let mut haproxy = PathBuf::from("haproxy");
        let mut drivers: Vec<String> = Vec::new();
        let mut more = Vec::new();
        let mut args = args.iter();
        while let Some(option) = args.next() {
            let value = args.next().ok_or_else(|| format!("{option} needs a value\n\n{USAGE}"))?;
            let list = || value.split(',').map(str::to_owned).collect::<Vec<String>>();
            match option.as_str() {
                "--nginx" => nginx = PathBuf::from(value),
                "--gale" => gale = PathBuf::from(value),
                "--h2o" => h2o = PathBuf::from(value),
                "--haproxy" => haproxy = PathBuf::from(value),
                "--server" => more.push(parse_server(value)?),
                "--gale-use" => drivers = list(),
                "--servers" => options.chosen = Some(list()),
                "--cases" => options.cases = Some(list()),
                "--connections" => {
                    options.connections = list().iter().map(|n| number(option, n)).collect::<Result<_, _>>()?;
                }
                "--short-connections" => options.short_connections = number(option, value)?,
                "--rounds" => options.rounds = number(option, value)?,
                "--seconds" => {
                    options.run_time = Duration::from_secs(number(option, value)?.into());
                }
                "--server-core" => options.server_core = core(option, value)?,
                "--client-core" => options.client_core = core(option, value)?,
                "--reloads" => options.reloads = number(option, value)?,
                "--keepalive-clients" => options.keepalive_clients = number(option, value)? as usize,
                "--short-clients" => options.short_clients = number(option, value)? as usize,
                "--results" => options.results = PathBuf::from(value),
                other => return Err(format!("there is no option {other}\n\n{USAGE}")),
            }
        }
        options.programs.push(Program::new("floor", Kind::Floor, Path::new("floor")));
        options.programs.push(Program::new("nginx", Kind::Nginx, &nginx));
        options.programs.extend(gale_programs(&gale, &drivers));
        options.programs.push(Program::new("h2o", Kind::H2o, &h2o));
        options.programs.push(Program::new("haproxy", Kind::Haproxy, &haproxy));
        options.programs.extend(more);
        Ok(options)
    }

    /// The servers to measure: those chosen, else `default`, else all. Binaries that are missing are an error when
    /// they were chosen, and a note otherwise.
    pub fn servers(&self, default: Option<&[&str]>) -> Result<Vec<Program>, String> {
        let default = default.map(|labels| labels.iter().map(|l| (*l).to_owned()).collect());
        let wanted: Option<Vec<String>> = self.chosen.clone().or(default);
        let is_wanted = |program: &&Program| {
            wanted.as_ref().is_none_or(|labels| labels.iter().any(|label| program.answers_to(label)))
        };
        let mut servers = Vec::new();
        for program in self.programs.iter().filter(is_wanted) {
            match program.resolve() {
                Ok(program) => servers.push(program),
                Err(error) if wanted.is_some() => return Err(error),
                Err(error) => eprintln!("note: without {}: {error}", program.label),
            }
        }
        if servers.is_empty() {
            return Err(format!("there is no server to measure among {:?}", wanted.unwrap_or_default()));
        }
        Ok(servers)
    }

    pub fn has_case(&self, name: &str) -> bool {
        self.cases.as_ref().is_none_or(|cases| cases.iter().any(|case| case == name))
    }
}

fn gale_programs(binary: &Path, drivers: &[String]) -> Vec<Program> {
    if drivers.is_empty() {
        return vec![Program::new("gale", Kind::Gale, binary)];
    }
    drivers
        .iter()
        .map(|driver| {
            let mut program = Program::new(&format!("gale {driver}"), Kind::Gale, binary);
            program.driver = Some(driver.clone());
            program
        })
        .collect()
}

fn parse_server(text: &str) -> Result<Program, String> {
    let malformed = || format!("--server needs LABEL=KIND:PATH, not \"{text}\"");
    let (label, rest) = text.split_once('=').ok_or_else(malformed)?;
    let (kind, path) = rest.split_once(':').ok_or_else(malformed)?;
    let kind = match kind {
        "nginx" => Kind::Nginx,
        "gale" => Kind::Gale,
        "h2o" => Kind::H2o,
        "haproxy" => Kind::Haproxy,
        _ => return Err(malformed()),
    };
    Ok(Program::new(label, kind, Path::new(path)))
}

fn number(option: &str, text: &str) -> Result<u32, String> {
    text.parse().ok().filter(|n| *n > 0).ok_or_else(|| format!("{option} needs a number above 0, not \"{text}\""))
}

fn core(option: &str, text: &str) -> Result<usize, String> {
    text.parse().map_err(|_| format!("{option} needs the number of a core, not \"{text}\""))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(words: &[&str]) -> Result<Options, String> {
        Options::parse(&words.iter().map(|word| word.to_string()).collect::<Vec<_>>())
    }

    #[test]
    fn the_floor_is_measured_first() {
        let labels = |options: &Options| options.programs.iter().map(|p| p.label.clone()).collect::<Vec<_>>();
        let options = parse(&["--gale-use", "epoll,io_uring", "--server", "old=nginx:/n"]).unwrap();
        assert_eq!(labels(&options), ["floor", "nginx", "gale epoll", "gale io_uring", "h2o", "haproxy", "old"]);
    }

    #[test]
    fn a_chosen_server_must_be_there() {
        let options = parse(&["--gale", "/nowhere/gale", "--servers", "gale"]).unwrap();
        assert!(options.servers(None).unwrap_err().contains("/nowhere/gale"));
    }

    #[test]
    fn wrong_options_are_refused() {
        for words in [&["--rounds"][..], &["--rounds", "0"], &["--server", "a=b"], &["--fast", "1"]] {
            assert!(parse(words).is_err(), "{words:?}");
        }
    }
}
