//! set: assigns a value to a session variable. See [`shared::set`](crate::shared::set).
//!   set $VARIABLE VALUE;                                         server
//! (<https://nginx.org/en/docs/stream/ngx_stream_set_module.html>)

use std::sync::Arc;

use gale_config::{Contexts, Custom, Diagnostic, Statement, Takes};
use gale_engine::configuration::Builder;
use gale_engine::module::{ConfType, Directive, Module};
use gale_engine::variables::Definition;
use gale_engine::variables::subject::Subject;
use gale_stream::module::StreamPart;
use gale_stream::session::Session;
use gale_stream::session::phases::{Decide, Flow, Phase};

use super::ROW;
use crate::shared::set::Set;

/// See the file's head.
pub static MODULE: Module = Module {
    name: "stream_set",
    directives: &[Directive {
        name: "set",
        contexts: Contexts::STREAM_SERVER,
        takes: Takes::Exactly(2),
        about: "Sets the value of a variable.",
        store: &Custom(add_set),
        ..ROW
    }],
    conf: Some(ConfType::of::<Conf>()),
    parts: &[&StreamPart {
        handlers: &[(Phase::PreAccess, &Decide { applies: |conf: &Conf| !conf.sets.is_empty(), run })],
        ..StreamPart::EMPTY
    }],
};

#[derive(Default)]
struct Conf {
    sets: Vec<Set<Session>>,
}

/// A variable without a value is empty; as in nginx, no warning is logged.
struct Empty;

impl Definition<Session> for Empty {
    fn append(&self, _: &Session, _: &mut Vec<u8>) -> bool {
        true
    }
}

fn add_set(conf: &mut Conf, builder: &mut Builder, statement: &Statement) -> Result<(), Diagnostic> {
    conf.sets.push(Set::parse(builder, statement, |_| Arc::new(Empty))?);
    Ok(())
}

fn run(session: &mut Session, conf: &Conf) -> Flow {
    for set in &conf.sets {
        let value = set.value.evaluate(session);
        session.assign_variable(set.variable, &value);
    }
    Flow::Next
}
