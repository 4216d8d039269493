//! A document with SSI commands, as a body: text passes through, and commands are executed.
//! (<https://nginx.org/en/docs/http/ngx_http_ssi_module.html#commands>)
//!
//! It is parsed on demand: an include leaves as an item of its own, and the filter `postpone` asks for more while the
//! included document is fetched. Only `wait` and `set` of `include` make the document itself wait.

use std::cell::Cell;
use std::rc::Rc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bstr::BStr;
use gale_base::log_level::Level;
use gale_engine::variables::subject::Subject;
use gale_http::request::Request;
use gale_http::request::body::{Body, BodyError, BodyItem, BodyStream};
use gale_http::request::subrequest::{Fallback, InMemorySubrequest, Subrequest, Target};
use gale_http::request::transform::InMemory;
use gale_http::variables::regex::Regex;
use gale_protocol::ssi::text::{self, Expression};
use gale_protocol::ssi::{Command, Event, PARAMETERS_MAX, Parser};
use gale_protocol::uri::escape::{Class, escape, escape_html};
use gale_runtime::{Bytes, Effort, charge_units, poll_units};

use super::page::{Page, TooMuch};
use super::{Conf, TimeFormat};

/// Effort of most commands: a value is looked up and copied.
const SMALL_EFFORT: Effort = Effort { usual_nanos: 1_000, worst_nanos: 50_000 };

/// Effort of an `if`, which may run a regular expression.
const EXPRESSION_EFFORT: Effort = Effort { usual_nanos: 10_000, worst_nanos: 200_000 };

/// Effort of an include, which prepares a request, and of a mistake, which is logged.
const LARGE_EFFORT: Effort = Effort { usual_nanos: 20_000, worst_nanos: 200_000 };

/// Effort of a KiB of text, which is read and searched even if it is hidden.
const TEXT_EFFORT: Effort = Effort { usual_nanos: 1_250, worst_nanos: 12_500 };

/// Texts up to this length are gathered until they reach it together: chunks, frames and TLS records of a few bytes
/// each would cost more than the copy.
const GATHERED_ITEM_MAX: usize = 4 * 1024;
const GATHERED_MAX: usize = 16 * 1024;

/// Number of bytes that are searched at once: as many as a file read returns.
const PIECE_BYTES: usize = 64 * 1024;

/// Maximum length of a text after its variables were expanded.
const TEXT_MAX: usize = 64 * 1024;

const ERROR_MESSAGE: &[u8] = b"[an error occurred while processing the directive]";

/// A document and the state of its parser.
pub struct Document {
    source: InMemory,
    /// The item that is being parsed.
    piece: Option<Piece>,
    parser: Parser,
    has_ended: bool,
    page: Rc<Page>,
    waits_for: Waiting,
    /// A command that waits for its share of a turn.
    found: Option<Event>,
    /// Text that was not sent yet, and the item behind it: `Some(None)` is the end.
    gathered: Vec<u8>,
    behind: Option<Option<Result<BodyItem, BodyError>>>,

    is_silent: bool,
    error_message: Bytes,
    time_format: TimeFormat,
    encoding: Encoding,
    /// `true` if text is shown; it is hidden in branches of an `if` that were not chosen, and in blocks.
    is_shown: bool,
    is_block: bool,
    /// Number of the open block; `None` if its text exceeds the bound.
    block: Option<usize>,
    condition: Condition,
    has_chosen: bool,
}

/// An item of the document: how far it was parsed, and how far it may be parsed in this turn.
struct Piece {
    bytes: Bytes,
    at: usize,
    until: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Condition {
    /// Outside of an `if`, or irrelevant.
    None,
    If,
    Else,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Encoding {
    None,
    Url,
    Entity,
}

/// A wait of the document.
enum Waiting {
    Nothing,
    /// `wait="yes"`: for the output of the included document.
    Output(Rc<Cell<bool>>),
    /// `set`: for the value of this variable.
    Value(Vec<u8>, InMemorySubrequest),
}

/// A command failed; the reason was logged.
struct Failed;

/// Item that a command inserts into the document.
type Outcome = Result<Option<BodyItem>, Failed>;

struct Row {
    name: &'static str,
    /// Allowed position: anywhere, before an `else`, or before `endif`.
    condition: Condition,
    /// Names of parameters; `true` for required ones.
    parameters: &'static [(&'static str, bool)],
    effort: Effort,
    run: fn(&mut Document, &Request, &Parameters<'_>) -> Outcome,
}

/// Values of a command's parameters, in the order of its row.
struct Parameters<'c> {
    command: &'c Command,
    values: [Option<&'c [u8]>; 5],
}

const COMMANDS: &[Row] = &[
    Row {
        name: "include",
        condition: Condition::None,
        parameters: &[("virtual", false), ("file", false), ("wait", false), ("set", false), ("stub", false)],
        effort: LARGE_EFFORT,
        run: Document::include,
    },
    Row {
        name: "echo",
        condition: Condition::None,
        parameters: &[("var", true), ("default", false), ("encoding", false)],
        effort: SMALL_EFFORT,
        run: Document::echo,
    },
    Row {
        name: "config",
        condition: Condition::None,
        parameters: &[("errmsg", false), ("timefmt", false)],
        effort: SMALL_EFFORT,
        run: Document::config,
    },
    Row {
        name: "set",
        condition: Condition::None,
        parameters: &[("var", true), ("value", true)],
        effort: SMALL_EFFORT,
        run: Document::set,
    },
    Row {
        name: "if",
        condition: Condition::None,
        parameters: &[("expr", true)],
        effort: EXPRESSION_EFFORT,
        run: Document::test,
    },
    Row {
        name: "elif",
        condition: Condition::If,
        parameters: &[("expr", true)],
        effort: EXPRESSION_EFFORT,
        run: Document::test,
    },
    Row { name: "else", condition: Condition::If, parameters: &[], effort: SMALL_EFFORT, run: Document::otherwise },
    Row { name: "endif", condition: Condition::Else, parameters: &[], effort: SMALL_EFFORT, run: Document::end_if },
    Row {
        name: "block",
        condition: Condition::None,
        parameters: &[("name", true)],
        effort: SMALL_EFFORT,
        run: Document::block,
    },
    Row {
        name: "endblock",
        condition: Condition::None,
        parameters: &[],
        effort: SMALL_EFFORT,
        run: Document::end_block,
    },
];

impl Document {
    /// Creates a document whose text is `body`.
    pub(super) fn new(body: Body, page: Rc<Page>, conf: &Conf, time_format: TimeFormat) -> Document {
        Document {
            source: InMemory::new(body),
            piece: None,
            parser: Parser::new(*conf.ssi_value_length.get()),
            has_ended: false,
            page,
            waits_for: Waiting::Nothing,
            found: None,
            gathered: Vec::new(),
            behind: None,
            is_silent: *conf.ssi_silent_errors.get(),
            error_message: Bytes::from_static(ERROR_MESSAGE),
            time_format,
            encoding: Encoding::Entity,
            is_shown: true,
            is_block: false,
            block: None,
            condition: Condition::None,
            has_chosen: false,
        }
    }
}

impl BodyStream for Document {
    fn poll_next(&mut self, request: &Request, context: &mut Context<'_>) -> Poll<Option<Result<BodyItem, BodyError>>> {
        while self.behind.is_none() {
            match self.poll_item(request, context) {
                Poll::Ready(Some(Ok(BodyItem::Bytes(bytes)))) if bytes.len() <= GATHERED_ITEM_MAX => {
                    self.gathered.extend_from_slice(&bytes);
                    if self.gathered.len() >= GATHERED_MAX {
                        return Poll::Ready(Some(Ok(self.take_gathered())));
                    }
                }
                Poll::Ready(other) => self.behind = Some(other),
                // Gathered text does not wait for more.
                Poll::Pending if self.gathered.is_empty() => return Poll::Pending,
                Poll::Pending => return Poll::Ready(Some(Ok(self.take_gathered()))),
            }
        }
        if !self.gathered.is_empty() {
            return Poll::Ready(Some(Ok(self.take_gathered())));
        }
        Poll::Ready(self.behind.take().expect("an item behind the text ended the loop"))
    }

    fn poll_ahead(&mut self, request: &Request, context: &mut Context<'_>) {
        self.source.poll_ahead(request, context);
    }

    fn is_at_end(&self) -> bool {
        self.gathered.is_empty() && matches!(self.behind, Some(None))
    }

    fn patience(&self, default: Duration) -> Duration {
        self.source.patience(default)
    }
}

impl Document {
    fn take_gathered(&mut self) -> BodyItem {
        BodyItem::Bytes(std::mem::take(&mut self.gathered).into())
    }

    /// Returns the next item of the document.
    fn poll_item(&mut self, request: &Request, context: &mut Context<'_>) -> Poll<Option<Result<BodyItem, BodyError>>> {
        loop {
            if let Err(error) = ready!(self.poll_waited(request, context)) {
                return Poll::Ready(Some(Err(error)));
            }
            if let Some(event) = self.found.take() {
                let effort = effort_of(&event);
                if poll_units(context, effort, 1).is_pending() {
                    self.found = Some(event);
                    return Poll::Pending;
                }
                let item = self.handle(request, event);
                charge_units(effort, 1);
                match item {
                    Some(item) => return Poll::Ready(Some(Ok(item))),
                    None => continue,
                }
            }
            let Some(piece) = &mut self.piece else {
                match ready!(self.source.poll_next(request, context)).transpose() {
                    Ok(Some(BodyItem::Bytes(bytes))) => {
                        self.piece = Some(Piece { bytes, at: 0, until: 0 });
                    }
                    Ok(None) => {
                        if std::mem::replace(&mut self.has_ended, true) {
                            return Poll::Ready(None);
                        }
                        let rest = self.parser.end().and_then(|event| self.handle(request, event));
                        if let Some(item) = rest {
                            return Poll::Ready(Some(Ok(item)));
                        }
                    }
                    other => return Poll::Ready(other.transpose()),
                }
                continue;
            };
            if piece.at == piece.until {
                let left = piece.bytes.len().saturating_sub(piece.until).min(PIECE_BYTES);
                if left == 0 {
                    self.piece = None;
                    continue;
                }
                // Hidden text has no other bound on its work.
                let units = left.div_ceil(1024);
                ready!(poll_units(context, TEXT_EFFORT, units));
                charge_units(TEXT_EFFORT, units);
                piece.until += left;
            }
            let Some(event) = self.parser.next(&piece.bytes[..piece.until], &mut piece.at) else { continue };
            // A sequence of commands has no other bound on its work.
            if matches!(event, Event::Command(_) | Event::Mistake(_)) {
                self.found = Some(event);
                continue;
            }
            if let Some(item) = self.handle(request, event) {
                return Poll::Ready(Some(Ok(item)));
            }
        }
    }

    /// Completes when the document need not wait any more.
    fn poll_waited(&mut self, request: &Request, context: &mut Context<'_>) -> Poll<Result<(), BodyError>> {
        match &mut self.waits_for {
            Waiting::Nothing => return Poll::Ready(Ok(())),
            // `postpone` polls again when the output has ended.
            Waiting::Output(has_ended) if !has_ended.get() => return Poll::Pending,
            Waiting::Output(_) => {}
            Waiting::Value(name, subrequest) => {
                let (status, value) = ready!(subrequest.poll(request, context))?;
                if status < 300 && self.page.set_variable(name, value).is_err() {
                    self.complain(request, too_much());
                }
            }
        }
        self.waits_for = Waiting::Nothing;
        Poll::Ready(Ok(()))
    }

    /// Returns the item that an event inserts into the document.
    fn handle(&mut self, request: &Request, event: Event) -> Option<BodyItem> {
        match event {
            Event::Text(range) => {
                let Piece { bytes, .. } = self.piece.as_mut().expect("the text belongs to this item");
                if self.is_shown {
                    return Some(BodyItem::Bytes(part(bytes, range)));
                }
                if self.is_block {
                    let kept = self.page.append_block(self.block, &bytes[range]);
                    self.check_block(request, kept);
                }
                None
            }
            Event::HeldText(text) if self.is_shown => Some(BodyItem::Bytes(Bytes::from_static(text))),
            Event::HeldText(text) => {
                if self.is_block {
                    let kept = self.page.append_block(self.block, text);
                    self.check_block(request, kept);
                }
                None
            }
            Event::Command(command) => self.carry_out(request, &command).unwrap_or_else(|Failed| self.failure()),
            Event::Mistake(message) => {
                self.complain(request, message);
                self.failure()
            }
        }
    }

    fn carry_out(&mut self, request: &Request, command: &Command) -> Outcome {
        let Some(row) = row_of(command) else {
            if self.is_shown {
                let message = format!("invalid SSI command: \"{}\"", BStr::new(&command.name));
                return Err(self.complain(request, message));
            }
            return Ok(None);
        };
        if !self.is_shown && row.name != "endblock" {
            if self.is_block {
                let mut text = Vec::new();
                command.append_text(&mut text);
                let kept = self.page.append_block(self.block, &text);
                self.check_block(request, kept);
                return Ok(None);
            }
            if row.condition == Condition::None {
                return Ok(None);
            }
        }
        if row.condition != Condition::None && (self.condition == Condition::None || self.condition > row.condition) {
            return Err(self.complain(request, format!("invalid context of SSI command: \"{}\"", row.name)));
        }
        let parameters = Parameters::of(command, row).map_err(|message| self.complain(request, message))?;
        (row.run)(self, request, &parameters)
    }

    /// Returns the text that replaces a failed command.
    fn failure(&self) -> Option<BodyItem> {
        let is_shown = !self.is_silent && !self.error_message.is_empty();
        is_shown.then(|| BodyItem::Bytes(self.error_message.clone()))
    }

    fn complain(&self, request: &Request, message: String) -> Failed {
        request.log(Level::Error, format_args!("{message}"));
        Failed
    }

    /// Handles a block that exceeds the bound: it stays open and hidden until its end, and only its text is lost.
    fn check_block(&mut self, request: &Request, kept: Result<(), TooMuch>) {
        if let Err(TooMuch) = kept {
            self.complain(request, too_much());
            if let Some(number) = self.block.take() {
                self.page.forget_block(number);
            }
        }
    }

    /// Returns a text with its variables expanded.
    fn evaluate(&self, request: &Request, text: &[u8]) -> Result<Vec<u8>, Failed> {
        let mut out = Vec::new();
        let mut is_too_long = false;
        let evaluated = text::evaluate(text, &mut out, |name, out| {
            is_too_long |= out.len() > TEXT_MAX;
            if !is_too_long {
                self.append_variable(request, name, out);
            }
        });
        charge_text(&out);
        evaluated.map_err(|message| self.complain(request, message))?;
        if is_too_long || out.len() > TEXT_MAX {
            return Err(self.complain(request, too_much()));
        }
        Ok(out)
    }

    fn append_variable(&self, request: &Request, name: &[u8], out: &mut Vec<u8>) -> bool {
        self.page.append_variable(name, out) || request.append_named_variable(name, out)
    }

    /// Executes `include virtual|file [wait] [set|stub]`.
    fn include(&mut self, request: &Request, parameters: &Parameters<'_>) -> Outcome {
        let [uri, file, wait, set, stub] = parameters.values;
        let complain = |message: String| Err(self.complain(request, message));
        let text = match (uri, file) {
            (Some(uri), Some(file)) => {
                let (uri, file) = (BStr::new(uri), BStr::new(file));
                return complain(format!("inclusion may be either virtual=\"{uri}\" or file=\"{file}\""));
            }
            (Some(text), None) | (None, Some(text)) => text,
            (None, None) => return complain("no parameter in \"include\" SSI command".to_owned()),
        };
        if set.is_some() && stub.is_some() {
            let message = "\"set\" and \"stub\" cannot be used together in \"include\" SSI command";
            return complain(message.to_owned());
        }
        let waits = match (wait, file) {
            (Some(_), Some(file)) => {
                return complain(format!("\"wait\" cannot be used with file=\"{}\"", BStr::new(file)));
            }
            (Some(wait), None) if wait.eq_ignore_ascii_case(b"yes") => true,
            (Some(wait), None) if !wait.eq_ignore_ascii_case(b"no") => {
                return complain(format!("invalid value \"{}\" in the \"wait\" parameter", BStr::new(wait)));
            }
            (_, file) => file.is_some(),
        };
        let target = self.target(request, text)?;
        if self.page.count_include().is_err() {
            return complain(too_much());
        }
        if let Some(name) = set {
            let name = name.to_ascii_lowercase();
            if !self.page.append_variable(&name, &mut Vec::new()) {
                // The variable exists, and is empty, even if the subrequest fails.
                let made = self.page.set_variable(&name, Bytes::new());
                made.map_err(|TooMuch| self.complain(request, too_much()))?;
            }
            let subrequest = InMemorySubrequest::start(request, target).ok_or(Failed)?;
            self.waits_for = Waiting::Value(name, subrequest);
            return Ok(None);
        }
        let fallback = match stub {
            Some(name) => Some(self.stub(request, name)?),
            None => None,
        };
        let subrequest = Subrequest::start(request, Target { fallback, ..target }).ok_or(Failed)?;
        if waits {
            self.waits_for = Waiting::Output(subrequest.end_flag());
        }
        Ok(Some(BodyItem::Subrequest(Box::new(subrequest))))
    }

    /// Returns the target of an include; a path without a slash at its beginning is relative to this document.
    fn target(&self, request: &Request, text: &[u8]) -> Result<Target, Failed> {
        let mut uri = self.evaluate(request, text)?;
        if !uri.starts_with(b"/") {
            let directory = request.uri.iter().rposition(|&byte| byte == b'/').map_or(0, |slash| slash + 1);
            uri.splice(0..0, request.uri[..directory].iter().copied());
        }
        Target::parse(request, &uri).ok_or(Failed)
    }

    fn stub(&self, request: &Request, name: &[u8]) -> Result<Fallback, Failed> {
        let text = self.page.block(name).ok_or_else(|| {
            let message = format!("\"stub\"=\"{}\" for \"include\" not found", BStr::new(name));
            self.complain(request, message)
        })?;
        Ok(Fallback { content_type: request.response.content_type.clone(), text })
    }

    /// Executes `echo var [default] [encoding]`.
    fn echo(&mut self, request: &Request, parameters: &Parameters<'_>) -> Outcome {
        let [name, default, encoding, ..] = parameters.values;
        let mut value = Vec::new();
        if !self.append_variable(request, &name.unwrap_or_default().to_ascii_lowercase(), &mut value) {
            value = default.unwrap_or(b"(none)").into();
        }
        if value.is_empty() {
            return Ok(None);
        }
        match encoding {
            None => {}
            Some(b"none") => self.encoding = Encoding::None,
            Some(b"url") => self.encoding = Encoding::Url,
            Some(b"entity") => self.encoding = Encoding::Entity,
            Some(other) => {
                let message = format!("unknown encoding \"{}\" in the \"echo\" command", BStr::new(other));
                self.complain(request, message);
            }
        }
        let mut shown = Vec::new();
        match self.encoding {
            Encoding::None => shown = value,
            Encoding::Url => escape(Class::Html, &value, &mut shown),
            Encoding::Entity => escape_html(&value, &mut shown),
        }
        charge_text(&shown);
        Ok(Some(BodyItem::Bytes(shown.into())))
    }

    /// Executes `config [errmsg] [timefmt]`.
    fn config(&mut self, _request: &Request, parameters: &Parameters<'_>) -> Outcome {
        let [message, time_format, ..] = parameters.values;
        if let Some(time_format) = time_format {
            self.time_format.0.replace(time_format.into());
        }
        if let Some(message) = message {
            self.error_message = Bytes::copy_from_slice(message);
        }
        Ok(None)
    }

    /// Executes `set var value`.
    fn set(&mut self, request: &Request, parameters: &Parameters<'_>) -> Outcome {
        let [name, value, ..] = parameters.values;
        let value = self.evaluate(request, value.unwrap_or_default())?;
        let kept = self.page.set_variable(&name.unwrap_or_default().to_ascii_lowercase(), value.into());
        kept.map_err(|TooMuch| self.complain(request, too_much()))?;
        Ok(None)
    }

    /// Executes `if expr` and `elif expr`.
    fn test(&mut self, request: &Request, parameters: &Parameters<'_>) -> Outcome {
        if parameters.command.name == b"if" && self.condition != Condition::None {
            let message = "the \"if\" command inside the \"if\" command";
            return Err(self.complain(request, message.to_owned()));
        }
        if self.has_chosen {
            self.is_shown = false;
            return Ok(None);
        }
        let [expression, ..] = parameters.values;
        self.is_shown = self.holds(request, expression.unwrap_or_default())?;
        self.has_chosen = self.is_shown;
        self.condition = Condition::If;
        Ok(None)
    }

    fn holds(&self, request: &Request, text: &[u8]) -> Result<bool, Failed> {
        let Some(expression) = Expression::parse(text) else {
            return Err(self.complain(request, format!("invalid expression in \"{}\"", BStr::new(text))));
        };
        let left = self.evaluate(request, &expression.left)?;
        let Some(comparison) = expression.comparison else { return Ok(!left.is_empty()) };
        let right = self.evaluate(request, &comparison.text)?;
        let is_same = if comparison.is_regex { self.matches(request, &right, left)? } else { left == right };
        Ok(is_same != comparison.is_negative)
    }

    fn matches(&self, request: &Request, expression: &[u8], text: Vec<u8>) -> Result<bool, Failed> {
        let regex = Regex::compile(expression, false).map_err(|message| self.complain(request, message))?;
        let found = regex.find(&text).map_err(|error| {
            request.log(Level::Alert, format_args!("regular expression failed: {error}"));
            Failed
        })?;
        let Some(found) = found else { return Ok(false) };
        let captures = found.captures;
        for (number, name) in regex.names() {
            let value = Bytes::copy_from_slice(captures.text(&text, number).unwrap_or_default());
            let kept = self.page.set_variable(name.to_ascii_lowercase().as_bytes(), value);
            kept.map_err(|TooMuch| self.complain(request, too_much()))?;
        }
        self.page.set_captures(captures, text);
        Ok(true)
    }

    /// Executes `else`.
    fn otherwise(&mut self, _request: &Request, _parameters: &Parameters<'_>) -> Outcome {
        self.is_shown = !self.has_chosen;
        self.condition = Condition::Else;
        Ok(None)
    }

    /// Executes `endif`.
    fn end_if(&mut self, _request: &Request, _parameters: &Parameters<'_>) -> Outcome {
        self.is_shown = true;
        self.has_chosen = false;
        self.condition = Condition::None;
        Ok(None)
    }

    /// Executes `block name`.
    fn block(&mut self, request: &Request, parameters: &Parameters<'_>) -> Outcome {
        let [name, ..] = parameters.values;
        self.is_shown = false;
        self.is_block = true;
        let begun = self.page.begin_block(name.unwrap_or_default().into());
        self.block = begun.ok();
        if self.block.is_none() {
            self.complain(request, too_much());
        }
        Ok(None)
    }

    /// Executes `endblock`.
    fn end_block(&mut self, _request: &Request, _parameters: &Parameters<'_>) -> Outcome {
        self.is_shown = true;
        self.is_block = false;
        self.block = None;
        Ok(None)
    }
}

impl<'c> Parameters<'c> {
    /// Checks a command's parameters. The error is nginx's message.
    fn of(command: &'c Command, row: &Row) -> Result<Parameters<'c>, String> {
        let name = row.name;
        if command.parameters.len() > PARAMETERS_MAX {
            return Err(format!("too many SSI command parameters: \"{name}\""));
        }
        let mut values = [None; 5];
        for (parameter, value) in &command.parameters {
            let found = row.parameters.iter().position(|(known, _)| known.as_bytes() == parameter);
            let parameter = BStr::new(parameter);
            let Some(index) = found else {
                return Err(format!("invalid parameter name: \"{parameter}\" in \"{name}\" SSI command"));
            };
            if values[index].replace(&value[..]).is_some() {
                return Err(format!("duplicate \"{parameter}\" parameter in \"{name}\" SSI command"));
            }
        }
        let absent = row.parameters.iter().zip(&values).find(|((_, is_needed), value)| *is_needed && value.is_none());
        match absent {
            Some(((parameter, _), _)) => {
                Err(format!("mandatory \"{parameter}\" parameter is absent in \"{name}\" SSI command"))
            }
            None => Ok(Parameters { command, values }),
        }
    }
}

fn row_of(command: &Command) -> Option<&'static Row> {
    COMMANDS.iter().find(|row| row.name.as_bytes() == command.name)
}

/// Returns the effort of an event's command.
fn effort_of(event: &Event) -> Effort {
    match event {
        Event::Command(command) => row_of(command).map_or(LARGE_EFFORT, |row| row.effort),
        Event::Text(_) | Event::HeldText(_) | Event::Mistake(_) => LARGE_EFFORT,
    }
}

/// Charges the time for a long text that a command makes.
fn charge_text(text: &[u8]) {
    if text.len() >= 1024 {
        charge_units(TEXT_EFFORT, text.len() / 1024);
    }
}

/// Returns the message of an exceeded bound, which nginx does not have.
fn too_much() -> String {
    "the SSI page has too many or too long variables, blocks or includes".to_owned()
}

/// Returns a part of the bytes. With all of them the parser has finished its piece.
fn part(bytes: &mut Bytes, range: std::ops::Range<usize>) -> Bytes {
    if range.len() == bytes.len() { std::mem::take(bytes) } else { bytes.slice(range) }
}

#[cfg(test)]
mod tests {
    use gale_config::Setting;
    use gale_runtime::{EventLoop, LoopOptions};

    use super::*;

    /// Returns the shown text of a document, the number of turns that it waited for, and the number of its items.
    fn shown(text: Vec<u8>) -> (Vec<u8>, u32, u32) {
        let request = Request::default();
        EventLoop::new(LoopOptions::simulated_time()).unwrap().run(async {
            let body = Body::Bytes(text.into());
            let conf =
                Conf { ssi_value_length: Setting::of(256), ssi_silent_errors: Setting::of(false), ..Conf::default() };
            let mut document = Document::new(body, Rc::default(), &conf, TimeFormat::default());
            let (mut shown, mut waits, mut items) = (Vec::new(), 0, 0);
            let next = std::future::poll_fn(|context| {
                loop {
                    match document.poll_next(&request, context) {
                        Poll::Ready(Some(item)) => {
                            shown.extend_from_slice(item.unwrap().bytes());
                            items += 1;
                        }
                        Poll::Ready(None) => return Poll::Ready(()),
                        Poll::Pending => {
                            waits += 1;
                            return Poll::Pending;
                        }
                    }
                }
            });
            next.await;
            (shown, waits, items)
        })
    }

    #[test]
    fn a_page_of_commands_takes_several_turns() {
        let mut text = b"<!--#set var=\"a\" value=\"x\" -->".repeat(5000);
        text.extend_from_slice(&b"<!--#echo var=\"a\" -->".repeat(5000));
        let (shown, waits, _) = shown(text);
        assert_eq!(shown, b"x".repeat(5000));
        assert!(waits >= 15, "{waits}");
    }

    #[test]
    fn short_texts_and_values_leave_together_and_long_ones_on_their_own() {
        let long = b"y".repeat(2 * GATHERED_ITEM_MAX);
        let few = b"some text <!--#set var=\"a\" value=\"x\" --><!--#echo var=\"a\" --> more".repeat(10);
        let (shown, _, items) = shown([&few[..], &long, b"<!--#echo var=\"a\" -->"].concat());
        assert_eq!(shown, [&b"some text x more".repeat(10)[..], &long, b"x"].concat());
        assert_eq!(items, 3);
    }

    #[test]
    fn text_takes_several_turns_whether_it_is_shown_or_not() {
        let text = b"text <!-".repeat(512 * 1024);
        let (all, waits, _) = shown(text.clone());
        assert!(all == text && waits >= 4, "{waits}");
        let (rest, waits, _) = shown([b"a<!--#if expr=\"\" -->", &text[..], b"<!--#endif -->b"].concat());
        assert_eq!(rest, b"ab");
        assert!(waits >= 4, "{waits}");
    }
}
