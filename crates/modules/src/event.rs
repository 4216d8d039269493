//! event: connection processing, the `events` block.
//!   main:
//!     events
//!   events:
//!     accept_mutex, accept_mutex_delay, debug_connection, epoll_events, multi_accept, use, worker_aio_requests,
//!     worker_connections
//! (<https://nginx.org/en/docs/ngx_core_module.html#events>)

use gale_base::units;
use gale_config::{Body, Contexts, Custom, Diagnostic, Inert, InertValue, One, Statement, Takes, slot, values};
use gale_engine::configuration::{Builder, EventsSettings, ScopeRef};
use gale_engine::module::{ConfType, Directive, Module};
use gale_runtime::DriverChoice;

/// See the file's head.
pub static MODULE: Module =
    Module { name: "event", directives: DIRECTIVES, conf: Some(ConfType::of::<EventsSettings>()), ..Module::EMPTY };

const DIRECTIVES: &[Directive] = &[
    Directive {
        name: "events",
        contexts: Contexts::MAIN,
        takes: Takes::Exactly(0),
        body: Body::Block,
        default: "",
        about: "Provides the context for directives that affect connection processing.",
        store: &Custom(events),
    },
    Directive {
        name: "worker_connections",
        contexts: Contexts::EVENTS,
        takes: Takes::Exactly(1),
        body: Body::None,
        default: "512",
        about: "Sets the maximum number of simultaneous connections of a worker (event loop).",
        store: &One { parse: connections, slot: slot!(EventsSettings, worker_connections) },
    },
    Directive {
        name: "use",
        contexts: Contexts::EVENTS,
        takes: Takes::Exactly(1),
        body: Body::None,
        default: "auto",
        about: "Sets the connection processing method: epoll, io_uring, or auto for the best available.",
        store: &One { parse: driver, slot: slot!(EventsSettings, driver) },
    },
    Directive {
        name: "multi_accept",
        contexts: Contexts::EVENTS,
        takes: Takes::Flag,
        body: Body::None,
        default: "off",
        about: "Enables or disables accepting all pending connections at a time, instead of one.",
        store: &One { parse: values::flag, slot: slot!(EventsSettings, multi_accept) },
    },
    Directive {
        name: "accept_mutex",
        contexts: Contexts::EVENTS,
        takes: Takes::Flag,
        body: Body::None,
        default: "off",
        about: "Enables or disables accepting connections by turns, one worker at a time.",
        store: &One { parse: values::flag, slot: slot!(EventsSettings, accept_mutex) },
    },
    Directive {
        name: "accept_mutex_delay",
        contexts: Contexts::EVENTS,
        takes: Takes::Exactly(1),
        body: Body::None,
        default: "500ms",
        about: "Sets how long a worker waits before it tries to accept again while another worker is accepting.",
        store: &One { parse: values::time_ms, slot: slot!(EventsSettings, accept_mutex_delay) },
    },
    inert_number("epoll_events", "No effect: the number of events taken from the kernel at once is fixed."),
    inert_number("worker_aio_requests", "No effect: asynchronous file operations are not limited separately."),
    inert("debug_connection", "No effect: there are no messages of the level debug."),
];

const fn inert(name: &'static str, about: &'static str) -> Directive {
    Directive {
        name,
        contexts: Contexts::EVENTS,
        takes: Takes::Exactly(1),
        body: Body::None,
        default: "",
        about,
        store: &Inert,
    }
}

const fn inert_number(name: &'static str, about: &'static str) -> Directive {
    Directive { store: &InertValue(values::number), ..inert(name, about) }
}

fn events(_: &mut (), builder: &mut Builder, statement: &Statement) -> Result<(), Diagnostic> {
    if std::mem::replace(&mut builder.has_events, true) {
        return Err(statement.directive_error("is duplicate"));
    }
    builder.walk(statement.body(), Contexts::EVENTS, ScopeRef::Main);
    Ok(())
}

fn connections(statement: &Statement) -> Result<usize, Diagnostic> {
    let word = &statement.args[0];
    let number = units::parse_number(&word.text).and_then(|number| usize::try_from(number).ok());
    number.filter(|&number| number > 0).ok_or_else(|| {
        let hint = "it must be a number, at least 1, in decimal digits only";
        Diagnostic::emerg(format!("invalid number \"{}\"", word.text)).at(word.span).hint(hint)
    })
}

fn driver(statement: &Statement) -> Result<DriverChoice, Diagnostic> {
    let word = &statement.args[0];
    match &**word.text {
        b"auto" => Ok(DriverChoice::Auto),
        b"epoll" => Ok(DriverChoice::Epoll),
        b"io_uring" => Ok(DriverChoice::IoUring),
        _ => Err(Diagnostic::emerg(format!("invalid event type \"{}\"", word.text))
            .at(word.span)
            .hint("it must be \"auto\", \"epoll\" or \"io_uring\"")),
    }
}
