//! A request as the subject of variables and of modules that are shared by all protocols.

use std::fmt;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use gale_base::log_level::Level;
use gale_engine::connections::ConnectionInfo;
use gale_engine::variables::subject::{Evaluation, Subject, Values};
use gale_log::ErrorLog;
use gale_resolver::Resolver;
use gale_runtime::SocketAddress;
use gale_upstream::{PassedOn, UpstreamTable};

use crate::configuration::builder::HttpBuilder;
use crate::request::Request;
use crate::variables::VariableTable;

impl Subject for Request {
    type Block = HttpBuilder;

    fn connection(&self) -> &ConnectionInfo {
        Request::connection(self)
    }

    fn remote(&self) -> &SocketAddress {
        Request::remote(self)
    }

    fn local(&self) -> Option<&SocketAddress> {
        self.exchange().local_address()
    }

    fn is_remote_set(&self) -> bool {
        Request::is_remote_set(self)
    }

    fn set_remote(&self, address: SocketAddress) {
        Request::set_remote(self, address);
    }

    fn shared_note<T: Default + 'static>(&self) -> Rc<T> {
        Request::shared_note(self)
    }

    fn hold<T: 'static>(&mut self, value: T) {
        Request::hold(self, value);
    }

    fn variables(&self) -> &VariableTable {
        &self.http().variables
    }

    fn values(&self) -> &Values {
        &self.shared.values
    }

    fn evaluation(&self) -> &Evaluation {
        &self.evaluation
    }

    fn body_bytes(&self) -> usize {
        self.body.as_ref().map_or(0, |body| body.length() - body.file_length()) as usize
    }

    fn log(&self, level: Level, message: fmt::Arguments<'_>) {
        Request::log(self, level, message);
    }

    fn error_log(&self) -> &Arc<ErrorLog> {
        self.configuration().error_log()
    }
}

impl PassedOn for Request {
    fn upstreams(&self) -> &UpstreamTable<Request> {
        &self.http().upstreams
    }

    fn resolver(&self) -> Option<(Rc<Resolver>, Duration)> {
        Request::resolver(self)
    }
}
