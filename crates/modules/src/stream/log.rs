//! log: access log with a line for each session, written at its end or (Gale's own) at its start. See
//! [`shared::access_log`](crate::shared::access_log).
//!   log_format NAME [escape=default|json|none] STRING ...;                         stream
//!   access_log off | PATH FORMAT [buffer=SIZE] [gzip[=LEVEL]] [flush=TIME] [if=CONDITION]
//!              [at=start|end];                                                   stream, server
//!   open_log_file_cache off | max=N [inactive=TIME] [min_uses=N] [valid=TIME];     stream, server
//! (<https://nginx.org/en/docs/stream/ngx_stream_log_module.html>)
//!
//! There is no predefined format and no default log.

use std::any::Any;
use std::rc::Rc;

use gale_config::{Contexts, Diagnostic};
use gale_engine::configuration::Builder;
use gale_engine::module::{ConfType, Module};
use gale_log::AccessBuffers;
use gale_stream::module::StreamPart;
use gale_stream::session::Session;
use gale_stream::session::phases::{Decide, Flow, Phase};

use super::PLACE;
use crate::shared::access_log::{AccessLogs, Logged, Moment, directives};

/// See the file's head.
pub static MODULE: Module = Module {
    name: "stream_log",
    directives: &directives::<Session>(Contexts::STREAM, PLACE, Contexts::NOWHERE),
    conf: Some(ConfType { merge, ..ConfType::of::<Conf>() }),
    parts: &[&StreamPart {
        handlers: &[
            (Phase::Start, &Decide { applies: |logs: &Conf| logs.has(Moment::Start), run: start }),
            (Phase::Log, &Decide { applies: |logs: &Conf| logs.has(Moment::End), run: end }),
        ],
        ..StreamPart::EMPTY
    }],
};

type Conf = AccessLogs<Session>;

fn start(session: &mut Session, logs: &Conf) -> Flow {
    logs.write(session, Moment::Start);
    Flow::Next
}

fn end(session: &mut Session, logs: &Conf) -> Flow {
    logs.write(session, Moment::End);
    Flow::Next
}

impl Logged for Session {
    const COMBINED: Option<&'static str> = None;
    const HAS_START: bool = true;
    const ABOUT: &'static str =
        "Sets the path, format and condition of the access log; may be repeated. Sessions are not logged by default.";

    fn access(&self) -> &Rc<AccessBuffers> {
        &self.worker().access
    }

    fn append_log_root(&self, out: &mut Vec<u8>) -> bool {
        out.push(b'/');
        true
    }
}

fn merge(conf: &mut dyn Any, parent: Option<&dyn Any>, _: &mut Builder) -> Result<(), Diagnostic> {
    const OURS: &str = "settings of this module";
    let conf: &mut Conf = conf.downcast_mut().expect(OURS);
    if let Some(parent) = parent {
        conf.inherit(parent.downcast_ref().expect(OURS));
    }
    Ok(())
}
