//! rewrite: changes of the URI, conditions, user-defined variables, and responses from the configuration.
//!   rewrite REGEX REPLACEMENT [last | break | redirect | permanent];   server, location, if
//!   if (CONDITION) { ... }                                             server, location
//!   set $VARIABLE VALUE;   break;                                      server, location, if
//!   return CODE [TEXT];   return CODE URL;   return URL;               server, location, if
//!   rewrite_log on|off;   uninitialized_variable_warn on|off;          http, server, location, if
//! (<https://nginx.org/en/docs/http/ngx_http_rewrite_module.html>)
//!
//! The directives of a server or a location form a script: steps that run in the order of the file. The steps of an
//! `if` block follow the `if` and are skipped if the condition is false; the block is also a scope, which the request
//! enters and stays in.
//!
//! ```text
//!   rewrite_a   if (condition, skips 2)   set_b   return_c   rewrite_d
//! ```
//!
//! Only the two switches are inherited: a server's script has run before a location is found. Only `-f`, `-d`, `-e` and
//! `-x` may have to wait.

use std::io;
use std::mem;
use std::sync::Arc;

use bstr::{BStr, BString};
use gale_base::log_level::Level;
use gale_base::os_error::OsErrorText;
use gale_base::units;
use gale_config::{
    Body as BlockBody, Contexts, Custom, Diagnostic, One, Setting, Statement, Takes, Word, slot, values,
};
use gale_engine::configuration::Builder;
use gale_engine::configuration::ScopeId;
use gale_engine::module::{ConfType, Directive, Module};
use gale_engine::variables::subject::Subject;
use gale_engine::variables::{Definition, VariableId};
use gale_files::{FileKind, FileMetadata};
use gale_http::configuration::ScopeKind;
use gale_http::configuration::builder::InHttp;
use gale_http::configuration::builder::nameless_block;
use gale_http::module::HttpPart;
use gale_http::request::Request;
use gale_http::request::body::Body;
use gale_http::request::files::open_files;
use gale_http::request::files::set_content_type;
use gale_http::request::phases::{Flow, LocalBoxFuture, Phase, Wait};
use gale_http::variables::regex::Regex;
use gale_http::variables::template::Template;
use gale_protocol::uri::escape::{Class, Unescape, escape, unescape};
use gale_runtime::Bytes;

use crate::shared::set::Set;

const IF: Contexts = Contexts::IF_IN_SERVER.or(Contexts::IF_IN_LOCATION);
const SCRIPT: Contexts = Contexts::SERVER.or(Contexts::LOCATION).or(IF);

/// See the file's head.
pub static MODULE: Module = Module {
    name: "http_rewrite",
    directives: &[
        Directive {
            name: "rewrite",
            contexts: SCRIPT,
            takes: Takes::Between(2, 3),
            body: BlockBody::None,
            default: "",
            about: "Changes a URI that matches a regular expression, or redirects the client.",
            store: &Custom(add_rewrite),
        },
        Directive {
            name: "if",
            contexts: Contexts::SERVER.or(Contexts::LOCATION),
            takes: Takes::AtLeast(1),
            body: BlockBody::Block,
            default: "",
            about: "Applies the directives in the block if a condition is true.",
            store: &Custom(add_if),
        },
        Directive {
            name: "set",
            contexts: SCRIPT,
            takes: Takes::Exactly(2),
            body: BlockBody::None,
            default: "",
            about: "Sets the value of a variable.",
            store: &Custom(add_set),
        },
        Directive {
            name: "return",
            contexts: SCRIPT,
            takes: Takes::Between(1, 2),
            body: BlockBody::None,
            default: "",
            about: "Stops processing and returns a status code, with a text or a redirect URL.",
            store: &Custom(add_return),
        },
        Directive {
            name: "break",
            contexts: SCRIPT,
            takes: Takes::Exactly(0),
            body: BlockBody::None,
            default: "",
            about: "Stops processing rewrite directives; the request stays in its location.",
            store: &Custom(add_break),
        },
        Directive {
            name: "rewrite_log",
            contexts: Contexts::ANYWHERE.or(IF),
            takes: Takes::Flag,
            body: BlockBody::None,
            default: "off",
            about: "Enables or disables logging of rewrite results at the notice level.",
            store: &One { parse: values::flag, slot: slot!(Conf, log) },
        },
        Directive {
            name: "uninitialized_variable_warn",
            contexts: Contexts::ANYWHERE.or(IF),
            takes: Takes::Flag,
            body: BlockBody::None,
            default: "on",
            about: "Enables or disables warnings about uninitialized variables.",
            store: &One { parse: values::flag, slot: slot!(Conf, warn) },
        },
    ],
    conf: Some(ConfType::of::<Conf>()),
    parts: &[&HttpPart {
        handlers: &[
            (
                Phase::ServerRewrite,
                &Wait { applies: has_script, first: begin, then: |request, conf| go_on(request, conf) },
            ),
            (
                Phase::Rewrite,
                &Wait { applies: has_script, first: begin_in_location, then: |request, conf| go_on(request, conf) },
            ),
        ],
        ..HttpPart::EMPTY
    }],
};

#[derive(Default)]
struct Conf {
    script: Vec<Step>,
    log: Setting<bool>,
    warn: Setting<bool>,
}

/// A directive of a script.
enum Step {
    Rewrite(Box<Rewrite>),
    If {
        condition: Condition,
        /// Scope that the request enters; `None` for a server's `if`, whose scope would not last.
        scope: Option<ScopeId>,
        /// Number of steps in the block.
        length: usize,
    },
    Set(Set<Request>),
    Return(Answer),
    Break,
}

struct Rewrite {
    regex: Regex,
    /// Replacement of the path, or for a redirect of the whole URI.
    target: Template,
    /// Arguments of the replacement.
    args: Option<Template>,
    /// `true` to append the request's own arguments: unless the replacement ends with a question mark.
    adds_args: bool,
    then: Then,
}

/// Effect of a matching `rewrite`.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Then {
    /// Continues with the next step.
    GoOn,
    /// `last`: ends the script and searches the location of the new URI.
    Last,
    /// `break`: ends the script; the request stays in its location.
    Break,
    /// `redirect`, `permanent`, or a replacement that is a URL.
    Redirect {
        status: u16,
        /// `true` if the replacement has arguments.
        has_args: bool,
    },
}

enum Condition {
    /// Neither empty nor `0`.
    IsSet(VariableId),
    Equals {
        variable: VariableId,
        value: Template,
        is_negated: bool,
    },
    Matches {
        variable: VariableId,
        regex: Regex,
        is_negated: bool,
    },
    File {
        path: Template,
        test: FileTest,
        is_negated: bool,
    },
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum FileTest {
    Regular,
    Directory,
    Exists,
    Executable,
}

struct Answer {
    status: u16,
    text: Option<Template>,
}

fn add_rewrite(conf: &mut Conf, builder: &mut Builder, statement: &Statement) -> Result<(), Diagnostic> {
    let http = builder.http_mut();
    let [expression, replacement, flags @ ..] = statement.args.as_slice() else {
        unreachable!("two arguments at least")
    };
    if replacement.text.is_empty() {
        return Err(Diagnostic::emerg("empty replacement").at(replacement.span));
    }
    let regex = http.regex(expression, &expression.text, false)?;
    let without_mark = replacement.text.strip_suffix(b"?");
    let text = without_mark.unwrap_or(&replacement.text);
    let has_args = text.contains(&b'?');
    let redirect = |status| Then::Redirect { status, has_args };
    let then = match flags.first() {
        Some(flag) => match &**flag.text {
            b"last" | b"break" if is_url(replacement) => redirect(302),
            b"last" => Then::Last,
            b"break" => Then::Break,
            b"redirect" => redirect(302),
            b"permanent" => redirect(301),
            _ => return Err(Diagnostic::emerg(format!("invalid parameter \"{}\"", flag.text)).at(flag.span)),
        },
        None if is_url(replacement) => redirect(302),
        None => Then::GoOn,
    };
    let is_redirect = matches!(then, Then::Redirect { .. });
    let part = |text: &[u8]| Word { text: text.into(), ..replacement.clone() };
    let mark = text.iter().position(|&byte| byte == b'?').filter(|_| !is_redirect);
    let (target, args) = match mark {
        Some(mark) => (http.template(&part(&text[..mark]))?, Some(http.template(&part(&text[mark + 1..]))?)),
        None => (http.template(&part(text))?, None),
    };
    let rewrite = Rewrite { regex, target, args, adds_args: without_mark.is_none(), then };
    conf.script.push(Step::Rewrite(Box::new(rewrite)));
    Ok(())
}

fn add_if(conf: &mut Conf, builder: &mut Builder, statement: &Statement) -> Result<(), Diagnostic> {
    let condition = condition(builder, statement)?;
    let is_of_server = builder.context == Contexts::SERVER;
    let place = if is_of_server { Contexts::IF_IN_SERVER } else { Contexts::IF_IN_LOCATION };
    let scope = nameless_block(builder, statement, place);
    let block =
        builder.http_mut().conf_mut::<Conf>(scope).map(|block| mem::take(&mut block.script)).unwrap_or_default();
    conf.script.push(Step::If { condition, scope: (!is_of_server).then_some(scope), length: block.len() });
    conf.script.extend(block);
    Ok(())
}

/// Parses the condition between the parentheses, which may be separate words.
fn condition(builder: &mut Builder, statement: &Statement) -> Result<Condition, Diagnostic> {
    let mut words = statement.args.clone();
    let invalid = |word: &Word, text: &BStr| Diagnostic::emerg(format!("invalid condition \"{text}\"")).at(word.span);
    let strip = |word: &mut Word, stripped: Option<BString>| match stripped {
        Some(text) => {
            word.text = text;
            Ok(())
        }
        None => Err(invalid(word, word)),
    };
    let first = words.first_mut().expect("one argument at least");
    strip(first, first.text.strip_prefix(b"(").map(BString::from))?;
    let last = words.last_mut().expect("one argument at least");
    strip(last, last.text.strip_suffix(b")").map(BString::from))?;
    // A parenthesis that stands alone leaves an empty word.
    if words.first().is_some_and(|word| word.text.is_empty() && statement.args[0].text == "(") {
        words.remove(0);
    }
    if words.last().is_some_and(|word| word.text.is_empty() && statement.args[statement.args.len() - 1].text == ")") {
        words.pop();
    }
    let http = builder.http_mut();
    match words.as_slice() {
        [variable] if is_variable(variable) => Ok(Condition::IsSet(http.variable(&variable[1..], Some(variable.span)))),
        [variable, operator, value] if is_variable(variable) => {
            let variable = http.variable(&variable[1..], Some(variable.span));
            let is_negated = operator.starts_with(b"!");
            match &**operator.text {
                b"=" | b"!=" => Ok(Condition::Equals { variable, value: http.template(value)?, is_negated }),
                b"~" | b"~*" | b"!~" | b"!~*" => {
                    let regex = http.regex(value, &value.text, operator.ends_with(b"*"))?;
                    Ok(Condition::Matches { variable, regex, is_negated })
                }
                _ => {
                    let message = format!("unexpected \"{}\" in condition", operator.text);
                    Err(Diagnostic::emerg(message).at(operator.span))
                }
            }
        }
        [operator, path] => {
            let is_negated = operator.starts_with(b"!");
            let test = match operator.strip_prefix(b"!").unwrap_or(operator) {
                b"-f" => FileTest::Regular,
                b"-d" => FileTest::Directory,
                b"-e" => FileTest::Exists,
                b"-x" => FileTest::Executable,
                _ => return Err(invalid(operator, operator)),
            };
            Ok(Condition::File { path: http.template(path)?, test, is_negated })
        }
        [word, ..] => Err(invalid(word, word)),
        [] => Err(invalid(&statement.args[0], BStr::new(""))),
    }
}

fn is_variable(word: &Word) -> bool {
    word.len() > 1 && word.starts_with(b"$")
}

fn add_set(conf: &mut Conf, builder: &mut Builder, statement: &Statement) -> Result<(), Diagnostic> {
    let set = Set::parse(builder, statement, |name| Arc::new(Uninitialized(name.into())))?;
    conf.script.push(Step::Set(set));
    Ok(())
}

fn add_break(conf: &mut Conf, _: &mut Builder, _: &Statement) -> Result<(), Diagnostic> {
    conf.script.push(Step::Break);
    Ok(())
}

fn add_return(conf: &mut Conf, builder: &mut Builder, statement: &Statement) -> Result<(), Diagnostic> {
    let answer = match statement.args.as_slice() {
        [word] => match status_of(word) {
            Some(status) => Answer { status, text: None },
            None if is_url(word) => Answer { status: 302, text: Some(builder.http_mut().template(word)?) },
            None => return Err(invalid_code(word)),
        },
        [word, text] => {
            let status = status_of(word).ok_or_else(|| invalid_code(word))?;
            let text = builder.http_mut().template(text)?;
            Answer { status, text: Some(text).filter(|text| !text.is_empty()) }
        }
        _ => return Err(statement.directive_error("takes one or two arguments")),
    };
    conf.script.push(Step::Return(answer));
    Ok(())
}

/// Returns `true` for statuses whose second argument is a URL.
fn is_redirect(status: u16) -> bool {
    matches!(status, 301 | 302 | 303 | 307 | 308)
}

fn status_of(word: &Word) -> Option<u16> {
    units::parse_number(&word.text)
        .and_then(|number| u16::try_from(number).ok())
        .filter(|status| !(100..200).contains(status) && *status <= 999)
}

fn is_url(word: &Word) -> bool {
    [&b"http://"[..], b"https://", b"$scheme"].iter().any(|start| word.text.starts_with(start))
}

fn invalid_code(word: &Word) -> Diagnostic {
    Diagnostic::emerg(format!("invalid return code \"{}\"", word.text)).at(word.span)
}

/// A variable before its `set` has run.
struct Uninitialized(Box<[u8]>);

impl Definition<Request> for Uninitialized {
    fn append(&self, request: &Request, _: &mut Vec<u8>) -> bool {
        if request.scope().conf_of::<Conf>().is_none_or(|conf| *conf.warn.get()) {
            let name = BStr::new(&self.0);
            request.log(Level::Warn, format_args!("using uninitialized \"{name}\" variable"));
        }
        true
    }
}

fn has_script(conf: &Conf) -> bool {
    !conf.script.is_empty()
}

/// Position in a script; a note while the script waits.
#[derive(Clone, Copy)]
struct Position {
    step: usize,
    /// `true` if captures are escaped as the URI was: until the first matching `rewrite`, as in nginx.
    encodes: bool,
}

/// Reason why a script stops.
enum Stop {
    Decided(Flow),
    /// The next step needs a file's metadata, which may block.
    AtFile,
}

fn begin(request: &mut Request, conf: &Conf) -> Option<Flow> {
    let mut position = Position { step: 0, encodes: true };
    match run(request, conf, &mut position) {
        Stop::Decided(flow) => Some(flow),
        Stop::AtFile => {
            request.notes.put(position);
            None
        }
    }
}

/// Begins the script of a location. A request without a location has run the server's script already.
fn begin_in_location(request: &mut Request, conf: &Conf) -> Option<Flow> {
    if request.scope().kind == ScopeKind::Server { Some(Flow::Next) } else { begin(request, conf) }
}

fn go_on<'a>(request: &'a mut Request, conf: &'a Conf) -> LocalBoxFuture<'a, Flow> {
    Box::pin(async move {
        let mut position = request.notes.take::<Position>().expect("a script that waits leaves its position");
        loop {
            if let Stop::Decided(flow) = run(request, conf, &mut position) {
                return flow;
            }
            let Step::If { condition: Condition::File { path, test, is_negated }, scope, length } =
                &conf.script[position.step]
            else {
                unreachable!("the step that the script has stopped at")
            };
            let path = text_of(path, request, position.encodes);
            let found = match test {
                FileTest::Directory => open_files::stat_directory(request, &path).await,
                _ => open_files::stat(request, &path).await,
            };
            let holds = test_file(request, &path, *test, found) != *is_negated;
            branch(request, &mut position, holds, *scope, *length);
        }
    })
}

/// Runs the steps until the script ends or one has to wait. Steps only go forward, so every script ends.
fn run(request: &mut Request, conf: &Conf, position: &mut Position) -> Stop {
    while let Some(step) = conf.script.get(position.step) {
        match step {
            Step::If { condition: Condition::File { .. }, .. } => return Stop::AtFile,
            Step::If { condition, scope, length } => match holds(request, conf, condition, position.encodes) {
                Ok(holds) => branch(request, position, holds, *scope, *length),
                Err(status) => return Stop::Decided(Flow::Respond(status)),
            },
            Step::Set(set) => {
                let value = text_of(&set.value, request, position.encodes);
                request.assign_variable(set.variable, &value);
                position.step += 1;
            }
            Step::Rewrite(step) => match rewrite(request, conf, step) {
                Rewritten::No => position.step += 1,
                Rewritten::GoOn => {
                    position.encodes = false;
                    position.step += 1;
                }
                Rewritten::End(flow) => return Stop::Decided(flow),
            },
            Step::Return(answer) => return Stop::Decided(respond(request, answer)),
            Step::Break => {
                request.stay_in_location();
                break;
            }
        }
    }
    Stop::Decided(Flow::Next)
}

fn branch(request: &mut Request, position: &mut Position, holds: bool, scope: Option<ScopeId>, length: usize) {
    position.step += 1;
    if !holds {
        position.step += length;
    } else if let Some(scope) = scope {
        request.scope = scope;
    }
}

/// Returns the text; captures are escaped if `encodes` is set and the URI was sent escaped.
fn text_of(template: &Template, request: &Request, encodes: bool) -> Vec<u8> {
    let mut out = Vec::new();
    if encodes && template.has_captures() && request.came_encoded() {
        template.append_with(request, &mut out, |text, out| escape(Class::Args, text, out));
    } else {
        template.append(request, &mut out);
    }
    out
}

/// Evaluates a condition. The error is the status of the response.
fn holds(request: &mut Request, conf: &Conf, condition: &Condition, encodes: bool) -> Result<bool, u16> {
    match condition {
        Condition::IsSet(variable) => Ok(!matches!(&*value_of(request, *variable), b"" | b"0")),
        Condition::Equals { variable, value, is_negated } => {
            let own = value_of(request, *variable);
            Ok((own == text_of(value, request, encodes)) != *is_negated)
        }
        Condition::Matches { variable, regex, is_negated } => {
            let text = value_of(request, *variable);
            Ok(matches(request, conf, regex, &text)? != *is_negated)
        }
        Condition::File { .. } => unreachable!("asked of the disk, which may have to wait"),
    }
}

fn value_of(request: &Request, variable: VariableId) -> Vec<u8> {
    let mut value = Vec::new();
    request.append_variable(variable, &mut value);
    value
}

/// Returns `true` if the text matches. `$1` to `$9` become its captures, or empty if it does not match.
fn matches(request: &Request, conf: &Conf, regex: &Regex, text: &[u8]) -> Result<bool, u16> {
    let found = regex.find(text).map_err(|error| {
        request.log(Level::Alert, format_args!("{error}"));
        500_u16
    })?;
    let is_match = found.is_some();
    if *conf.log.get() {
        let verb = if is_match { "matches" } else { "does not match" };
        request.log(Level::Notice, format_args!("\"{}\" {verb} \"{}\"", regex.pattern(), BStr::new(text)));
    }
    match found {
        Some(matched) => request.take_match(matched, text),
        None => request.forget_match(),
    }
    Ok(is_match)
}

/// Returns `true` if the file passes the test. As in nginx a special file fails `-e`, and `-x` looks at the mode alone:
/// a directory passes it, and so does a file that only its owner may execute.
fn test_file(request: &Request, path: &[u8], test: FileTest, found: io::Result<FileMetadata>) -> bool {
    const EXECUTABLE_BY_OWNER: u32 = 0o100;
    match found {
        Ok(metadata) => match test {
            FileTest::Regular => metadata.is_regular(),
            FileTest::Directory => metadata.is_directory(),
            FileTest::Exists => metadata.kind != FileKind::Other,
            FileTest::Executable => metadata.mode & EXECUTABLE_BY_OWNER != 0,
        },
        Err(error) => {
            if !matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ENOTDIR | libc::ENAMETOOLONG)) {
                let path = BStr::new(path);
                request.log(Level::Crit, format_args!("stat() \"{path}\" failed {}", OsErrorText(&error)));
            }
            false
        }
    }
}

/// Result of a `rewrite`.
enum Rewritten {
    No,
    GoOn,
    End(Flow),
}

fn rewrite(request: &mut Request, conf: &Conf, rewrite: &Rewrite) -> Rewritten {
    match matches(request, conf, &rewrite.regex, &request.uri) {
        Ok(false) => return Rewritten::No,
        Ok(true) => {}
        Err(status) => return Rewritten::End(Flow::Respond(status)),
    }
    if let Then::Redirect { status, has_args } = rewrite.then {
        redirect(request, conf, rewrite, has_args);
        return Rewritten::End(Flow::Respond(status));
    }
    let mut uri = Vec::with_capacity(request.uri.len());
    rewrite.target.append(request, &mut uri);
    if let Some(args) = &rewrite.args {
        let mut args = text_of(args, request, true);
        if rewrite.adds_args && !request.args.is_empty() {
            args.push(b'&');
            args.extend_from_slice(&request.args);
        }
        request.args = args;
    } else if !rewrite.adds_args {
        request.args.clear();
    }
    if *conf.log.get() {
        let (uri, args) = (BStr::new(&uri), BStr::new(&request.args));
        request.log(Level::Notice, format_args!("rewritten data: \"{uri}\", args: \"{args}\""));
    }
    if uri.is_empty() {
        request.log(Level::Error, format_args!("the rewritten URI has a zero length"));
        return Rewritten::End(Flow::Respond(500));
    }
    request.rewrite_uri(uri);
    match rewrite.then {
        Then::GoOn => Rewritten::GoOn,
        Then::Break => {
            request.stay_in_location();
            Rewritten::End(Flow::Next)
        }
        Then::Last | Then::Redirect { .. } => Rewritten::End(Flow::Next),
    }
}

/// Sets the URL of a redirect.
fn redirect(request: &mut Request, conf: &Conf, rewrite: &Rewrite, has_args: bool) {
    let text = text_of(&rewrite.target, request, true);
    let mut place = Vec::with_capacity(text.len() + request.args.len() + 1);
    let used = unescape(Unescape::Redirect, &text, &mut place);
    place.extend_from_slice(&text[used..]);
    if rewrite.adds_args && !request.args.is_empty() {
        place.push(if has_args { b'&' } else { b'?' });
        place.extend_from_slice(&request.args);
    }
    if *conf.log.get() {
        request.log(Level::Notice, format_args!("rewritten redirect: \"{}\"", BStr::new(&place)));
    }
    request.response.location = place;
}

fn respond(request: &mut Request, answer: &Answer) -> Flow {
    let status = answer.status;
    if is_redirect(status) {
        request.response.location = answer.text.as_ref().map(|text| text.evaluate(request)).unwrap_or_default();
        return Flow::Respond(status);
    }
    let Some(text) = &answer.text else {
        return if status >= 400 { Flow::Respond(status) } else { respond_with(request, status, Bytes::new()) };
    };
    // The text may contain `$status`.
    request.response.status = status;
    let body = match text.as_constant() {
        Some(text) => Bytes::copy_from_slice(text),
        None => text.evaluate(request).into(),
    };
    respond_with(request, status, body)
}

/// Answers with the text; no error page replaces it.
fn respond_with(request: &mut Request, status: u16, body: Bytes) -> Flow {
    request.response.status = status;
    if status == 204 {
        return Flow::Answer(Body::Empty);
    }
    set_content_type(request);
    Flow::Answer(if body.is_empty() { Body::Empty } else { Body::Bytes(body) })
}
