//! [`Session`] as the subject of variables and of modules that are generic over protocols.

use std::fmt;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use gale_base::log_level::Level;
use gale_engine::connections::ConnectionInfo;
use gale_engine::variables::VariableTable;
use gale_engine::variables::subject::{Evaluation, Subject, Values};
use gale_log::{Describe, ErrorLog, Fields};
use gale_resolver::Resolver;
use gale_runtime::SocketAddress;
use gale_upstream::{PassedOn, UpstreamTable};

use super::builder::StreamBuilder;
use crate::session::Session;

impl Subject for Session {
    type Block = StreamBuilder;

    fn connection(&self) -> &ConnectionInfo {
        &self.connection
    }

    fn remote(&self) -> &SocketAddress {
        self.address.get().unwrap_or(&self.connection.remote)
    }

    fn local(&self) -> Option<&SocketAddress> {
        self.local_address()
    }

    fn is_remote_set(&self) -> bool {
        self.address.get().is_some()
    }

    fn set_remote(&self, address: SocketAddress) {
        self.address.get_or_init(|| address);
    }

    fn shared_note<T: Default + 'static>(&self) -> Rc<T> {
        self.shared_notes.borrow_mut().note()
    }

    fn hold<T: 'static>(&mut self, value: T) {
        self.held.put(value);
    }

    fn variables(&self) -> &VariableTable<Session> {
        &self.stream().variables
    }

    fn values(&self) -> &Values {
        &self.values
    }

    fn evaluation(&self) -> &Evaluation {
        &self.evaluation
    }

    fn log(&self, level: Level, message: fmt::Arguments<'_>) {
        let log = &self.scope().error_log;
        if log.takes(level) {
            log.write_about(level, Some(self.connection.number), &message, &Context(self));
        }
    }

    fn error_log(&self) -> &Arc<ErrorLog> {
        &self.scope().error_log
    }
}

impl PassedOn for Session {
    fn upstreams(&self) -> &UpstreamTable<Session> {
        &self.stream().upstreams
    }

    fn resolver(&self) -> Option<(Rc<Resolver>, Duration)> {
        let core = self.core();
        Some((self.worker.resolver(core.resolver.get_opt()?), *core.resolver_timeout.get()))
    }
}

/// Fields that nginx appends to every message about a session.
struct Context<'s>(&'s Session);

impl Describe for Context<'_> {
    fn describe(&self, fields: &mut impl Fields) -> fmt::Result {
        let Context(session) = self;
        let before = if session.datagrams().is_some() { ", udp client: " } else { ", client: " };
        match session.remote() {
            SocketAddress::Inet(address) => fields.text(before, "client", &address.ip(), "")?,
            SocketAddress::Unix(_) => fields.text(before, "client", &"unix:", "")?,
        }
        fields.text(", server: ", "server", &session.connection.listening, "")?;
        if let Some(attempts) = session.attempts.begun() {
            if let Some(peer) = attempts.peer() {
                fields.text(", upstream: \"", "upstream", &peer, "\"")?;
            }
            fields.number(", bytes from/to client:", "bytes_from_client", session.received())?;
            fields.number("/", "bytes_to_client", session.sent())?;
            fields.number(", bytes from/to upstream:", "bytes_from_upstream", attempts.received())?;
            fields.number("/", "bytes_to_upstream", attempts.sent())?;
        }
        Ok(())
    }
}
