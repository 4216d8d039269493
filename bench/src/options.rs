//! options: measurements, binaries and durations, from the command line.
//!
//! A server whose binary is missing is left out with a note, unless it was requested by name.

use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::case::Case;
use crate::client::ClientKind;
use crate::servers::{Kind, Program};
use crate::thread_pools::Experiment;

pub const USAGE: &str = "\
usage: cargo xtask bench MEASUREMENT [OPTION…]

  cpu           CPU time per request: keep-alive, a 1 KiB file, short connections; all servers in turn
  syscalls      system calls per request, the server's core saturated
  idle          memory per idle keep-alive connection
  accept        shared socket, reuseport, accept_mutex: requests/s, latency, spread over two workers
  scaling       one against two workers: CPU time, task switches, futex calls
  instructions  user-space instructions per request, files with `aio auto` and `off` (callgrind)
  parts         the same, by purpose and by function (callgrind, addr2line)
  locked        locked instructions per request, by function (callgrind, objdump, addr2line)
  lookups       the same with ten and with thousands of locations, map values and geo networks (callgrind)
  figures       the same without and with status zones and traces (callgrind)
  check         instructions to read and check large configurations, as at a start or reload (callgrind)
  profile       where the user-space time goes (perf record)
  reload        many reloads under load, every response checked; memory before and after
  respawn       the worker process killed under load; time until requests are served again
  files         CPU time per request of files of 1 KiB, 10 KiB, 64 KiB, 4 MiB: keep-alive and short connections
  http2         CPU time per request over HTTP/2: small responses, one stream, 64 KiB, unary gRPC calls (h2load)
  floods        hostile HTTP/2 clients: latency of another client, memory of the server
  proxy         CPU time per proxied request: small, 64 KiB, 4 MiB buffered and not, short connections
  stream        CPU time per proxied exchange, connection, GiB and datagram, also over TLS; memory of tunnels;
                two workers
  applications  CPU time per request that PHP-FPM (FastCGI) or uWSGI (uwsgi) answers
  first-byte    time to the first byte of proxied responses, requests at a fixed rate
  scrapes       latency of clients while thousands of metrics are scraped every second (Gale)
  large-reload  the same while a configuration of 20,000 locations is reloaded again and again (Gale)
  large-put     the same while 10,000 servers of a group are replaced again and again (Gale)
  tunnels       5,000 WebSockets through a proxy: memory, echoes while reloads pass
  upstreams     two workers and a group: new connections, and latency when half of the servers are slow
  burst         latency of one client during a burst of large requests of others
  thread-pools  a slow disk beside a file in memory: nginx and Gale with each value of aio (complete as root)
  cache-collapse  100 clients ask for a cold object of a slow backend at once
  cache-hits      hits by eviction policy, simulated
  cache-million a cache with a million entries: memory, first hit after kill -9, purge of a tag
  cache-disks   three disks with a cache each: hits in memory beside cold ones, and one disk that hangs (root)
  slow-peers    1 GiB through a proxy to a slow client, to a slow server: memory, latency of a probe (root)
  slow-ranges   1,000 clients at 1 Mbit/s in a file of 2 GiB: memory per client, stalls
  cold-tree     random requests into 200,000 small files, none of them in memory, beside a hot one (root)
  rare-files    files in memory that are requested every 0.1 to 30 s, beside clients of a slow disk (root)
  late          50 clients that come late for a file in memory, beside clients of a slow disk (root)
  charts        redraw the charts of thread-pools from existing results, without measuring
  all           cpu, syscalls, idle, accept, scaling, reload and respawn

  --nginx PATH | --gale PATH | --h2o PATH | --haproxy PATH | --varnish PATH
                         paths of the binaries (default: from PATH; gale: target/release/gale)
  --server LABEL=KIND:PATH
                         one more server; KIND: nginx, gale, h2o, haproxy, varnish. May be
                         repeated
  --gale-use A,B         measure each gale once per driver, with `use A;` in events (default: epoll,io_uring);
                         `default` omits the directive
  --servers A,B          only those labels (default: all available, or those that fit: nginx and gale, or gale)
  --cases A,B            cpu, syscalls, scaling, instructions, profile: return, file, short; cpu: short-pair, too;
                         files, instructions: 1k, 10k, 64k, 4m
                         proxy: small, 64k, 4m, 4m-unbuffered, short; applications: fastcgi, uwsgi
                         burst: file-50, file-200, file-1000, read-200, gzip-50, ssi-50, autoindex-20,
                         handshakes-1000
                         syscalls, profile: proxied, fastcgi, uwsgi, too
                         locked: return, file, open-file-cache, proxied, cached, limited, counted
                         instructions, parts: proxied, fastcgi, uwsgi, two-workers, too
                         figures: zone, zones, file, proxied, chance, traces
                         cpu, instructions: realistic, realistic-plain, gzip-1k, -3k, -10k, -20k, gzip (100 KiB), too
  --client wrk|lean      client of keep-alive connections (default: wrk; syscalls and profile: lean)
  --connections N[,N]    keep-alive connections (default: 128,500; of file, scaling and profile: the first;
                         of syscalls: the last)
  --short-connections N  connections of the short case (default: 64)
  --idle-connections N   idle: 10000
  --idle-seconds N       idle: how long the connections then stay idle (default: 10)
  --rounds N             5; idle: 3
  --seconds S            one run (default: 4; rare-files: 90; late: 8)
  --bursts N             burst: 10, half of them where the server computes (gzip, SSI, names, handshakes)
  --requests N           instructions, parts, locked, lookups, figures: 5000
  --callgrind-gale PATH  instructions, parts, locked, lookups, figures, check: a Gale built for valgrind;
                         else one is built
  --server-core N, --client-core N
                         cores of server and client (default: 0 and 1)
  --reloads N            default: 1000
  --keepalive-clients N, --short-clients N
                         threads of the load under reload and respawn (default: 8 and 4)
  --directory DIR        thread-pools, slow-ranges, slow-peers, cold-tree, rare-files, late: directory of the files
                         (default: the temporary directory)
  --data-mib N           thread-pools, rare-files, late: 4096
  --memory-mib N         of server and page cache (default: three eighths of the data; rare-files: its files, too)
  --disk-mib-s N         limit on reads of the disk (default: 100)
  --over clear|tls       thread-pools: transport of clients 1 and 2 (default: clear)
  --disk own|small       own: the directory's; small: one behind a queue of 4 requests (default: own)
  --workers N            of the server there (default: 2)
  --tree-files N         cold-tree: 200000
  --cache-entries N      cache-million: 1000000
  --slow-clients N       slow-ranges: 1000
  --range-file-mib N     slow-ranges: 2048
  --results DIR          directory for Markdown and JSON (default: bench/results)
";

#[derive(Debug)]
pub struct Options {
    /// The floors first, then the others in the order of measurement.
    pub programs: Vec<Program>,
    /// Labels given with --servers.
    pub chosen: Option<Vec<String>>,
    pub cases: Option<Vec<String>>,
    pub client: Option<ClientKind>,
    /// At least one.
    pub connections: Vec<u32>,
    pub short_connections: u32,
    pub idle_connections: usize,
    pub idle_time: Duration,
    pub rounds: u32,
    pub idle_rounds: u32,
    pub run_time: Duration,
    pub rare_time: Duration,
    pub late_time: Duration,
    pub bursts: usize,
    pub requests: u32,
    pub callgrind_gale: Option<PathBuf>,
    pub server_core: usize,
    pub client_core: usize,
    pub reloads: u32,
    pub upgrades: u32,
    /// Duration of the campaign's `soak`.
    pub soak_hours: Option<u32>,
    pub keepalive_clients: usize,
    pub short_clients: usize,
    pub results: PathBuf,
    pub experiment: Experiment,
}

impl Options {
    pub fn parse(args: &[String]) -> Result<Options, String> {
        let bench = Path::new(env!("CARGO_MANIFEST_DIR"));
        let mut options = Options {
            programs: Vec::new(),
            chosen: None,
            cases: None,
            client: None,
            connections: vec![128, 500],
            short_connections: 64,
            idle_connections: 10_000,
            idle_time: Duration::from_secs(10),
            rounds: 5,
            idle_rounds: 3,
            run_time: Duration::from_secs(4),
            rare_time: Duration::from_secs(90),
            late_time: Duration::from_secs(8),
            bursts: 10,
            requests: 5000,
            callgrind_gale: None,
            server_core: 0,
            client_core: 1,
            reloads: 1000,
            upgrades: 100,
            soak_hours: None,
            keepalive_clients: 8,
            short_clients: 4,
            results: bench.join("results"),
            experiment: Experiment::default(),
        };
        let mut nginx = PathBuf::from("nginx");
        let mut gale = bench.join("../target/release/gale");
        let mut h2o = PathBuf::from("h2o");
        let mut haproxy = PathBuf::from("haproxy");
        let mut varnish = PathBuf::from("varnishd");
        let mut drivers = vec!["epoll".to_owned(), "io_uring".to_owned()];
        let mut more = Vec::new();
        let mut args = args.iter();
        while let Some(option) = args.next() {
            let value = args.next().ok_or_else(|| format!("{option} needs a value\n\n{USAGE}"))?;
            let list = || value.split(',').map(str::to_owned).collect::<Vec<String>>();
            let count = || number(option, value).map(|number| number as usize);
            let seconds = || number(option, value).map(|number| Duration::from_secs(number.into()));
            match option.as_str() {
                "--nginx" => nginx = PathBuf::from(value),
                "--gale" => gale = PathBuf::from(value),
                "--h2o" => h2o = PathBuf::from(value),
                "--haproxy" => haproxy = PathBuf::from(value),
                "--varnish" => varnish = PathBuf::from(value),
                "--server" => more.push(parse_server(value)?),
                "--gale-use" => drivers = list(),
                "--servers" => options.chosen = Some(list()),
                "--cases" => options.cases = Some(list()),
                "--client" => options.client = Some(client(value)?),
                "--connections" => {
                    options.connections = list().iter().map(|n| number(option, n)).collect::<Result<_, _>>()?;
                }
                "--short-connections" => options.short_connections = number(option, value)?,
                "--idle-connections" => options.idle_connections = count()?,
                "--idle-seconds" => options.idle_time = seconds()?,
                "--rounds" => {
                    options.rounds = number(option, value)?;
                    options.idle_rounds = options.rounds;
                }
                "--seconds" => {
                    options.run_time = seconds()?;
                    (options.rare_time, options.late_time) = (options.run_time, options.run_time);
                }
                "--bursts" => options.bursts = count()?,
                "--requests" => options.requests = number(option, value)?,
                "--callgrind-gale" => options.callgrind_gale = Some(PathBuf::from(value)),
                "--server-core" => options.server_core = core(option, value)?,
                "--client-core" => options.client_core = core(option, value)?,
                "--reloads" => options.reloads = number(option, value)?,
                "--upgrades" => options.upgrades = number(option, value)?,
                "--hours" => options.soak_hours = Some(number(option, value)?),
                "--keepalive-clients" => options.keepalive_clients = count()?,
                "--short-clients" => options.short_clients = count()?,
                "--directory" => options.experiment.directory = PathBuf::from(value),
                "--data-mib" => options.experiment.data_mib = number(option, value)?.into(),
                "--memory-mib" => options.experiment.memory_mib = Some(number(option, value)?.into()),
                "--disk-mib-s" => options.experiment.disk_mib_per_second = number(option, value)?.into(),
                "--disk" => options.experiment.on_small_disk = is_small(value)?,
                "--over" => options.experiment.is_over_tls = is_tls(value)?,
                "--workers" => options.experiment.workers = count()?,
                "--tree-files" => options.experiment.tree_files = count()?,
                "--cache-entries" => options.experiment.cache_entries = count()?,
                "--slow-clients" => options.experiment.slow_clients = count()?,
                "--range-file-mib" => options.experiment.range_file_mib = number(option, value)?.into(),
                "--results" => options.results = PathBuf::from(value),
                other => return Err(format!("there is no option {other}\n\n{USAGE}")),
            }
        }
        for driver in ["epoll", "io_uring"] {
            let floor = Program::new("floor", Kind::Floor, Path::new("floor"));
            options.programs.push(floor.with_driver(driver));
        }
        options.programs.push(Program::new("nginx", Kind::Nginx, &nginx));
        let gale = Program::new("gale", Kind::Gale, &gale);
        options.programs.extend(with_each_driver(gale, &drivers));
        options.programs.push(Program::new("h2o", Kind::H2o, &h2o));
        options.programs.push(Program::new("haproxy", Kind::Haproxy, &haproxy));
        options.programs.push(Program::new("varnish", Kind::Varnish, &varnish));
        options.programs.extend(more.into_iter().flat_map(|program| with_each_driver(program, &drivers)));
        Ok(options)
    }

    /// Returns the servers to measure: the chosen ones, else `default`, else all that serve without a backend. A
    /// missing binary is an error for a chosen server, and otherwise a note.
    pub fn servers(&self, default: Option<&[&str]>) -> Result<Vec<Program>, String> {
        let default = default.map(|labels| labels.iter().map(|l| (*l).to_owned()).collect());
        let wanted: Option<Vec<String>> = self.chosen.clone().or(default);
        let is_wanted = |program: &&Program| {
            let serves_alone = program.kind != Kind::Varnish;
            wanted.as_ref().map_or(serves_alone, |labels| labels.iter().any(|label| program.answers_to(label)))
        };
        let mut servers = Vec::new();
        for program in self.programs.iter().filter(is_wanted) {
            match program.resolve() {
                Ok(program) => servers.push(program),
                Err(error) if self.chosen.is_some() => return Err(error),
                Err(error) => eprintln!("note: without {}: {error}", program.label),
            }
        }
        if servers.is_empty() {
            return Err(format!("there is no server to measure among {:?}", wanted.unwrap_or_default()));
        }
        Ok(servers)
    }

    /// Returns the chosen cases, or all if none are chosen.
    pub fn chosen_cases(&self, mut cases: Vec<Case>) -> Result<Vec<Case>, String> {
        let mut names: Vec<&str> = cases.iter().map(|case| case.name).collect();
        names.dedup();
        let names = names.join(", ");
        cases.retain(|case| self.cases.as_ref().is_none_or(|chosen| chosen.iter().any(|name| name == case.name)));
        if cases.is_empty() { Err(format!("no case was chosen; there are {names}")) } else { Ok(cases) }
    }
}

/// Returns a variant of Gale for each driver; other servers unchanged.
fn with_each_driver(program: Program, drivers: &[String]) -> Vec<Program> {
    if program.kind != Kind::Gale {
        return vec![program];
    }
    let with =
        |driver: &String| if driver == "default" { program.clone() } else { program.clone().with_driver(driver) };
    drivers.iter().map(with).collect()
}

fn client(text: &str) -> Result<ClientKind, String> {
    match text {
        "wrk" => Ok(ClientKind::Wrk),
        "lean" => Ok(ClientKind::Lean),
        _ => Err(format!("--client needs wrk or lean, not \"{text}\"")),
    }
}

fn is_tls(text: &str) -> Result<bool, String> {
    match text {
        "clear" => Ok(false),
        "tls" => Ok(true),
        _ => Err(format!("--over needs clear or tls, not \"{text}\"")),
    }
}

fn is_small(text: &str) -> Result<bool, String> {
    match text {
        "own" => Ok(false),
        "small" => Ok(true),
        _ => Err(format!("--disk needs own or small, not \"{text}\"")),
    }
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
        "varnish" => Kind::Varnish,
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
        let options = parse(&["--server", "old=nginx:/n", "--server", "before=gale:/g"]).unwrap();
        let expected = [
            "floor epoll",
            "floor io_uring",
            "nginx",
            "gale epoll",
            "gale io_uring",
            "h2o",
            "haproxy",
            "varnish",
            "old",
            "before epoll",
            "before io_uring",
        ];
        assert_eq!(labels(&options), expected);
    }

    #[test]
    fn a_name_means_every_driver() {
        let options = parse(&["--gale-use", "default", "--servers", "floor"]).unwrap();
        let labels: Vec<String> = options.servers(None).unwrap().into_iter().map(|program| program.label).collect();
        assert_eq!(labels, ["floor epoll", "floor io_uring"]);
        assert!(options.programs.iter().any(|program| program.label == "gale"));
    }

    #[test]
    fn a_chosen_server_must_be_there() {
        let options = parse(&["--gale", "/nowhere/gale", "--servers", "gale"]).unwrap();
        assert!(options.servers(None).unwrap_err().contains("/nowhere/gale"));
    }

    #[test]
    fn seconds_shorten_runs_that_are_longer_by_default() {
        let times = |options: Options| [options.run_time, options.rare_time, options.late_time].map(|t| t.as_secs());
        assert_eq!(times(parse(&[]).unwrap()), [4, 90, 8]);
        assert_eq!(times(parse(&["--seconds", "3"]).unwrap()), [3, 3, 3]);
    }

    #[test]
    fn wrong_options_are_refused() {
        for words in
            [&["--rounds"][..], &["--rounds", "0"], &["--server", "a=b"], &["--fast", "1"], &["--client", "ab"]]
        {
            assert!(parse(words).is_err(), "{words:?}");
        }
    }
}
