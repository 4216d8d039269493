//! A request as the subject of variables, and of the modules that are written once for all protocols.

use std::fmt;

use gale_base::log_level::Level;

use crate::configuration::builder::HttpBuilder;
use crate::request::Request;
use crate::variables::VariableTable;
use gale_engine::variables::subject::{Evaluation, Subject, Values};

impl Subject for Request {
    type Block = HttpBuilder;

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
        self.body.iter().flat_map(|body| &body.memory).map(|bytes| bytes.len()).sum()
    }

    fn log(&self, level: Level, message: fmt::Arguments<'_>) {
        Request::log(self, level, message);
    }
}
