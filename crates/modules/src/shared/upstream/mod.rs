//! upstream: groups of servers, for any protocol.
//!   upstream NAME { ... }
//!   server ADDRESS [weight=N] [max_conns=N] [max_fails=N] [fail_timeout=TIME] [slow_start=TIME] [backup] [down]
//!                  [drain] [resolve] [service=NAME] [route=NAME];
//!   zone NAME [SIZE];  state FILE;
//!   hash KEY [consistent];  ip_hash;  least_conn;  random [two [METHOD]];
//!   least_time header | last_byte [inflight];
//!   keepalive N [local];  keepalive_requests N;  keepalive_time TIME;  keepalive_timeout TIME;
//!   queue N [timeout=TIME];
//!   retry_budget off | PERCENT% [min=N];
//!   outlier_ejection [interval=TIME] [requests=N] [errors=PERCENT%] [latency=FACTOR] [time=TIME] [max=PERCENT%];
//!   resolver ADDRESS ...;  resolver_timeout TIME;
//!   sticky cookie | route | learn ...;  ntlm;
//! (<https://nginx.org/en/docs/http/ngx_http_upstream_module.html>)
//!
//! This file parses the directives; [`gale_upstream`] implements them.

mod server;
mod sticky;

use std::path::PathBuf;
use std::sync::Arc;

use gale_base::units;
use gale_config::{Body, Contexts, Custom, Diagnostic, Setting, Severity, Statement, Takes, values};
use gale_engine::configuration::{Builder, ZoneSize, parse_resolver};
use gale_engine::module::Directive;
use gale_engine::variables::subject::Subject;
use gale_upstream::{
    Balance, GroupDraft, HasUpstreams, LeastTime, OutlierSettings, Preference, QueueSettings, RetryBudgetSettings,
    upstreams_of,
};

use super::limits::invalid_parameter;

/// Returns the directives for groups that are declared in `around`.
pub const fn directives<S: Subject>(around: Contexts) -> [Directive; 18]
where
    S::Block: HasUpstreams<S>,
{
    let inside = S::Block::INSIDE;
    let row = Directive {
        name: "",
        contexts: inside,
        takes: Takes::Exactly(1),
        body: Body::None,
        default: "",
        about: "",
        store: const { &Custom(block::<S>) },
    };
    [
        Directive {
            name: "upstream",
            contexts: around,
            body: Body::Block,
            about: "Defines a group of servers.",
            ..row
        },
        Directive {
            name: "server",
            takes: Takes::AtLeast(1),
            about: "Defines the address and other parameters of a server.",
            store: const { &Custom(server::server::<S>) },
            ..row
        },
        Directive {
            name: "zone",
            takes: Takes::Between(1, 2),
            about: "Sets the name and size of the group's shared memory zone; workers share the group's state even \
                    without it.",
            store: const { &Custom(zone::<S>) },
            ..row
        },
        Directive {
            name: "state",
            about: "Specifies the file that keeps the servers of the group, as server directives.",
            store: const { &Custom(state::<S>) },
            ..row
        },
        Directive {
            name: "hash",
            takes: Takes::Between(1, 2),
            about: "Sets the load balancing method: requests with the same key go to the same server.",
            store: const { &Custom(hash::<S>) },
            ..row
        },
        Directive {
            name: "ip_hash",
            takes: Takes::Exactly(0),
            about: "Sets the load balancing method: requests from the same client address go to the same server.",
            store: const { &Custom(ip_hash::<S>) },
            ..row
        },
        Directive {
            name: "least_conn",
            takes: Takes::Exactly(0),
            about: "Sets the load balancing method: the server with the fewest active requests for its weight is \
                    chosen.",
            store: const { &Custom(least_conn::<S>) },
            ..row
        },
        Directive {
            name: "least_time",
            takes: Takes::Between(1, 2),
            about: "Sets the load balancing method: the server with the least average response time and fewest active \
                    requests is chosen.",
            store: const { &Custom(least_time::<S>) },
            ..row
        },
        Directive {
            name: "random",
            takes: Takes::Between(0, 2),
            about: "Sets the load balancing method: a random server is chosen by weight, or the better of two random \
                    servers.",
            store: const { &Custom(random::<S>) },
            ..row
        },
        Directive {
            name: "keepalive",
            takes: Takes::Between(1, 2),
            about: "Sets the maximum number of idle keepalive connections to the group for each worker; 32 local by \
                    default.",
            store: const { &Custom(keepalive::<S>) },
            ..row
        },
        Directive {
            name: "keepalive_requests",
            about: "Sets the maximum number of requests served through one keepalive connection; 1000 by default.",
            store: const { &Custom(|_: &mut (), b, s| once::<S, _>(b, s, |g| &mut g.keepalive_requests, values::number)) },
            ..row
        },
        Directive {
            name: "keepalive_time",
            about: "Limits the time during which requests are processed through one keepalive connection; 1h by \
                    default.",
            store: const { &Custom(|_: &mut (), b, s| once::<S, _>(b, s, |g| &mut g.keepalive_time, values::time_ms)) },
            ..row
        },
        Directive {
            name: "keepalive_timeout",
            about: "Sets how long an idle keepalive connection stays open; 60s by default.",
            store: const { &Custom(|_: &mut (), b, s| once::<S, _>(b, s, |g| &mut g.keepalive_timeout, values::time_ms)) },
            ..row
        },
        Directive {
            name: "queue",
            takes: Takes::Between(1, 2),
            about: "Sets the maximum number of requests that wait while no server can be chosen, and their timeout.",
            store: const { &Custom(|_: &mut (), b, s| once::<S, _>(b, s, |g| &mut g.queue, queue)) },
            ..row
        },
        Directive {
            name: "retry_budget",
            takes: Takes::Between(1, 2),
            about: "Limits the share of requests that are tried on another server: N% [min=N] or off; 20% min=100 \
                    (per second and worker) by default.",
            store: const { &Custom(|_: &mut (), b, s| once::<S, _>(b, s, |g| &mut g.retry_budget, retry_budget)) },
            ..row
        },
        Directive {
            name: "outlier_ejection",
            takes: Takes::AtLeast(0),
            about: "Ejects, for a while, servers whose errors or response times stand out from those of the group.",
            store: const { &Custom(|_: &mut (), b, s| once::<S, _>(b, s, |g| &mut g.outlier_ejection, outlier_ejection)) },
            ..row
        },
        Directive {
            name: "resolver",
            takes: Takes::AtLeast(1),
            about: "Configures the name servers that resolve names of the group's servers.",
            store: const { &Custom(resolver::<S>) },
            ..row
        },
        Directive {
            name: "resolver_timeout",
            about: "Sets the timeout for name resolution.",
            store: const { &Custom(|_: &mut (), b, s| once::<S, _>(b, s, |g| &mut g.resolver_timeout, values::time_ms)) },
            ..row
        },
    ]
}

/// Returns `sticky`, which needs cookies and so exists in http only.
pub const fn sticky_directive<S: Subject>() -> Directive
where
    S::Block: HasUpstreams<S>,
{
    Directive {
        name: "sticky",
        contexts: S::Block::INSIDE,
        takes: Takes::AtLeast(2),
        body: Body::None,
        default: "",
        about: "Enables session affinity, by a cookie, a route, or sessions learned from responses.",
        store: const { &Custom(sticky::sticky::<S>) },
    }
}

/// Returns `ntlm`, which concerns the requests of a connection and so exists in http only.
pub const fn ntlm_directive<S: Subject>() -> Directive
where
    S::Block: HasUpstreams<S>,
{
    Directive {
        name: "ntlm",
        contexts: S::Block::INSIDE,
        takes: Takes::Exactly(0),
        body: Body::None,
        default: "",
        about: "Allows proxying of NTLM and Negotiate authentication: an authenticated connection is bound to its \
                client's connection.",
        store: const { &Custom(|_: &mut (), b, s| once::<S, _>(b, s, |g| &mut g.ntlm, |_| Ok(true))) },
    }
}

fn block<S: Subject>(_: &mut (), builder: &mut Builder, statement: &Statement) -> Result<(), Diagnostic>
where
    S::Block: HasUpstreams<S>,
{
    let name = &statement.args[0];
    upstreams_of::<S>(builder).open(&name.text, name.span)?;
    let scope = builder.scope;
    let errors =
        |builder: &Builder| builder.diagnostics.iter().filter(|found| found.severity == Severity::Emerg).count();
    let errors_before = errors(builder);
    builder.walk(statement.body(), S::Block::INSIDE, scope);
    let is_understood = errors(builder) == errors_before;
    let group = upstreams_of::<S>(builder).current();
    match (group.servers.first(), group.state.is_set()) {
        (None, false) if is_understood => {
            let end = statement.block_end.unwrap_or(name.span);
            Err(Diagnostic::emerg("no servers are inside upstream").at(end))
        }
        (Some(server), true) => {
            let error = group.state.error("\"state\" directive cannot be used along with \"server\"");
            Err(error
                .related("the first server", server.span)
                .hint("the servers of this group come from the state file"))
        }
        _ => Ok(()),
    }
}

fn state<S: Subject>(_: &mut (), builder: &mut Builder, statement: &Statement) -> Result<(), Diagnostic>
where
    S::Block: HasUpstreams<S>,
{
    let path = builder.full_path(&statement.args[0].text);
    once::<S, _>(builder, statement, |group| &mut group.state, |_| Ok(PathBuf::new()))?;
    upstreams_of::<S>(builder).current().state.set(path, Some(statement.args[0].span));
    Ok(())
}

/// Sets a value that may be set only once.
fn once<S: Subject, T>(
    builder: &mut Builder,
    statement: &Statement,
    setting: fn(&mut GroupDraft<S>) -> &mut Setting<T>,
    parse: fn(&Statement) -> Result<T, Diagnostic>,
) -> Result<(), Diagnostic>
where
    S::Block: HasUpstreams<S>,
{
    let setting = setting(upstreams_of::<S>(builder).current());
    if setting.is_set() {
        return Err(statement.directive_error("is duplicate"));
    }
    setting.set(parse(statement)?, Some(statement.span));
    Ok(())
}

/// The zone of a group. It holds no state: workers share the group's state without it.
struct GroupZone;

const ZONE: &str = "zone";

fn zone<S: Subject>(_: &mut (), builder: &mut Builder, statement: &Statement) -> Result<(), Diagnostic>
where
    S::Block: HasUpstreams<S>,
{
    let name = &statement.args[0];
    if name.text.is_empty() {
        return Err(Diagnostic::emerg(format!("invalid zone name \"{}\"", name.text)).at(name.span));
    }
    match statement.args.get(1) {
        Some(size) => {
            let size = ZoneSize::of(name, size)?;
            builder.declare_zone::<GroupZone>(ZONE, &size, statement.span)?.declare(GroupZone);
        }
        None => drop(builder.zone::<GroupZone>(ZONE, &name.text, name.span)?),
    }
    Ok(())
}

/// Sets the balancing method of a group. A second method replaces the first.
fn choose_by<S: Subject>(builder: &mut Builder, statement: &Statement, balance: Balance)
where
    S::Block: HasUpstreams<S>,
{
    let setting = &mut upstreams_of::<S>(builder).current().balance;
    let earlier = setting.span();
    setting.set(balance, Some(statement.span));
    if let Some(earlier) = earlier {
        let warning = Diagnostic::warn("load balancing method redefined").at(statement.name.span);
        builder.note([warning.related("first defined", earlier)]);
    }
}

fn ip_hash<S: Subject>(_: &mut (), builder: &mut Builder, statement: &Statement) -> Result<(), Diagnostic>
where
    S::Block: HasUpstreams<S>,
{
    choose_by::<S>(builder, statement, Balance::IpHash);
    Ok(())
}

fn least_conn<S: Subject>(_: &mut (), builder: &mut Builder, statement: &Statement) -> Result<(), Diagnostic>
where
    S::Block: HasUpstreams<S>,
{
    choose_by::<S>(builder, statement, Balance::LeastConn);
    Ok(())
}

fn hash<S: Subject>(_: &mut (), builder: &mut Builder, statement: &Statement) -> Result<(), Diagnostic>
where
    S::Block: HasUpstreams<S>,
{
    let key = builder.variables::<S>().template(&statement.args[0])?;
    let balance = match statement.args.get(1) {
        None => Balance::Hash,
        Some(word) if word.text == "consistent" => Balance::ConsistentHash,
        Some(word) => return Err(invalid_parameter(word)),
    };
    choose_by::<S>(builder, statement, balance);
    upstreams_of::<S>(builder).current().key = Some(key);
    Ok(())
}

fn least_time<S: Subject>(_: &mut (), builder: &mut Builder, statement: &Statement) -> Result<(), Diagnostic>
where
    S::Block: HasUpstreams<S>,
{
    let counts_inflight = match statement.args.get(1) {
        None => false,
        Some(word) if word.text == "inflight" => true,
        Some(word) => return Err(invalid_parameter(word)),
    };
    let metric = values::enumeration(statement, S::Block::TIMES)?;
    choose_by::<S>(builder, statement, Balance::LeastTime(LeastTime { metric, counts_inflight }));
    Ok(())
}

fn random<S: Subject>(_: &mut (), builder: &mut Builder, statement: &Statement) -> Result<(), Diagnostic>
where
    S::Block: HasUpstreams<S>,
{
    let preference = match statement.args.as_slice() {
        [] => None,
        [two, ..] if two.text != "two" => return Err(invalid_parameter(two)),
        [_] => Some(Preference::LeastConn),
        [_, method, ..] if method.text == "least_conn" => Some(Preference::LeastConn),
        [_, method, ..] => {
            let time = method.text.strip_prefix(b"least_time=").ok_or_else(|| invalid_parameter(method))?;
            let known = S::Block::TIMES.iter().find(|(name, _)| name.as_bytes() == time);
            Some(Preference::LeastTime(known.ok_or_else(|| invalid_parameter(method))?.1))
        }
    };
    choose_by::<S>(builder, statement, Balance::Random(preference));
    Ok(())
}

/// Upper bound of idle connections: the number of ports of one address.
const IDLE_MAX: u64 = 65_535;

fn keepalive<S: Subject>(_: &mut (), builder: &mut Builder, statement: &Statement) -> Result<(), Diagnostic>
where
    S::Block: HasUpstreams<S>,
{
    once::<S, _>(
        builder,
        statement,
        |group| &mut group.keepalive,
        |statement| {
            let number = &statement.args[0];
            let connections = units::parse_number(&number.text).ok_or_else(|| {
                let message = format!("invalid value \"{}\" in \"keepalive\" directive", number.text);
                Diagnostic::emerg(message).at(number.span)
            })?;
            let is_local = match statement.args.get(1) {
                None => false,
                Some(word) if word.text == "local" => true,
                Some(word) => return Err(invalid_parameter(word)),
            };
            Ok((connections.min(IDLE_MAX) as usize, is_local))
        },
    )
}

/// Upper bound of queued requests.
const QUEUE_MAX: u64 = 1 << 20;

fn queue(statement: &Statement) -> Result<QueueSettings, Diagnostic> {
    let requests_max = values::number_between(statement, 1, QUEUE_MAX)? as usize;
    let timeout = statement.args.get(1).map(|word| {
        let time = word.text.strip_prefix(b"timeout=").and_then(units::parse_time);
        time.ok_or_else(|| invalid_parameter(word))
    });
    Ok(QueueSettings { requests_max, timeout: timeout.transpose()?.unwrap_or(QueueSettings::TIMEOUT_DEFAULT) })
}

fn retry_budget(statement: &Statement) -> Result<Option<RetryBudgetSettings>, Diagnostic> {
    let number = |text| units::parse_number(text).and_then(|number| u32::try_from(number).ok());
    let (share, min) = match statement.args.as_slice() {
        [off] if off.text == "off" => return Ok(None),
        [share] => (share, None),
        [share, min, ..] => (share, Some(min)),
        [] => unreachable!("an argument"),
    };
    let percent = share.text.strip_suffix(b"%").and_then(number).filter(|&percent| percent <= 100);
    let percent = percent.ok_or_else(|| invalid_parameter(share))?;
    let min_per_second = min.map(|min| {
        let count = min.text.strip_prefix(b"min=").and_then(number);
        count.ok_or_else(|| invalid_parameter(min))
    });
    let default = RetryBudgetSettings::default().min_per_second;
    Ok(Some(RetryBudgetSettings { percent, min_per_second: min_per_second.transpose()?.unwrap_or(default) }))
}

fn outlier_ejection(statement: &Statement) -> Result<OutlierSettings, Diagnostic> {
    let mut settings = OutlierSettings::default();
    for word in &statement.args {
        take_ejection(&mut settings, &word.text).ok_or_else(|| invalid_parameter(word))?;
    }
    Ok(settings)
}

/// Applies a parameter of `outlier_ejection`. Returns `None` if it is unknown or invalid.
fn take_ejection(settings: &mut OutlierSettings, text: &[u8]) -> Option<()> {
    let number = |text: &[u8]| units::parse_number(text).and_then(|number| u32::try_from(number).ok());
    let percent = |text: &[u8]| number(text.strip_suffix(b"%")?).filter(|percent| (1..=100).contains(percent));
    let time = |text| units::parse_time(text).filter(|time| !time.is_zero());
    if let Some(value) = text.strip_prefix(b"interval=") {
        settings.interval = time(value)?;
    } else if let Some(value) = text.strip_prefix(b"requests=") {
        settings.requests_min = number(value).filter(|&number| number > 0)?;
    } else if let Some(value) = text.strip_prefix(b"errors=") {
        settings.errors_percent = percent(value)?;
    } else if let Some(value) = text.strip_prefix(b"latency=") {
        settings.latency_factor = number(value).filter(|&factor| factor > 1)?;
    } else if let Some(value) = text.strip_prefix(b"time=") {
        settings.time = time(value)?;
    } else {
        settings.max_percent = percent(text.strip_prefix(b"max=")?)?;
    }
    Some(())
}

fn resolver<S: Subject>(_: &mut (), builder: &mut Builder, statement: &Statement) -> Result<(), Diagnostic>
where
    S::Block: HasUpstreams<S>,
{
    if upstreams_of::<S>(builder).current().resolver.is_set() {
        return Err(statement.directive_error("is duplicate"));
    }
    let settings = Arc::new(parse_resolver(builder, statement)?);
    upstreams_of::<S>(builder).current().resolver.set(settings, Some(statement.span));
    Ok(())
}
