//! log: access log with a line for each request. See [`shared::access_log`](crate::shared::access_log).
//!   log_format NAME [escape=default|json|none] STRING ...;                         http
//!   access_log off | PATH [FORMAT [buffer=SIZE] [gzip[=LEVEL]] [flush=TIME] [if=CONDITION]];
//!                       http, server, location, if in location, limit_except
//!   open_log_file_cache off | max=N [inactive=TIME] [min_uses=N] [valid=TIME];     http, server, location
//! (<https://nginx.org/en/docs/http/ngx_http_log_module.html>)

use std::any::Any;
use std::os::unix::ffi::OsStrExt;
use std::rc::Rc;

use gale_config::{Contexts, Diagnostic};
use gale_engine::configuration::Builder;
use gale_engine::module::{ConfType, Module};
use gale_http::module::HttpPart;
use gale_http::request::Request;
use gale_http::request::files::directory_of;
use gale_http::request::phases::{Decide, Flow, Phase};
use gale_log::AccessBuffers;

use crate::shared::access_log::{AccessLogs, Logged, Moment, directives};

/// See the file's head.
pub static MODULE: Module = Module {
    name: "http_log",
    directives: &directives::<Request>(Contexts::HTTP, Contexts::ANYWHERE, CONDITIONS),
    conf: Some(ConfType { merge, ..ConfType::of::<Conf>() }),
    parts: &[&HttpPart {
        handlers: &[(Phase::Log, &Decide { applies: |conf: &Conf| conf.has(Moment::End), run: log })],
        ..HttpPart::EMPTY
    }],
};

const CONDITIONS: Contexts = Contexts::IF_IN_LOCATION.or(Contexts::LIMIT_EXCEPT);

type Conf = AccessLogs<Request>;

impl Logged for Request {
    const COMBINED: Option<&'static str> = Some(
        "$remote_addr - $remote_user [$time_local] \"$request\" \
                        $status $body_bytes_sent \"$http_referer\" \"$http_user_agent\"",
    );
    const ABOUT: &'static str =
        "Sets the path, format and condition of the access log; may be repeated. -V shows the default path.";

    fn access(&self) -> &Rc<AccessBuffers> {
        &self.worker().common.access
    }

    fn append_log_root(&self, out: &mut Vec<u8>) -> bool {
        directory_of(self, out)
    }
}

fn log(request: &mut Request, conf: &Conf) -> Flow {
    conf.write(request, Moment::End);
    Flow::Next
}

/// Sets a server's default log. The http block itself gets none, since it serves no requests and must not create the
/// default file if every server has its own log.
fn merge(conf: &mut dyn Any, parent: Option<&dyn Any>, builder: &mut Builder) -> Result<(), Diagnostic> {
    const OURS: &str = "settings of this module";
    let conf: &mut Conf = conf.downcast_mut().expect(OURS);
    let Some(parent) = parent else { return Ok(()) };
    if !conf.inherit(parent.downcast_ref().expect(OURS)) {
        let path = builder.default_access_log_path();
        conf.set_default(builder, path.as_os_str().as_bytes());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::path::{Path, PathBuf};

    use gale_config::{Files, Sources, parse_text};
    use gale_engine::configuration::{ScopeId, ScopeRef};
    use gale_engine::module::Order;
    use gale_http::configuration::builder::InHttp;
    use gale_log::DeferredLog;
    use gale_process::BuildRequest;

    use crate::shared::access_log::{Log, LogTarget, combined, is_false};

    use super::*;

    /// Returns the settings of each block in `http`, in the order of the text, or the errors.
    fn read(text: &str) -> Result<Builder, Vec<String>> {
        let request = BuildRequest {
            program: "gale".to_owned(),
            configuration_path: "/etc/gale/gale.conf".into(),
            prefix: "/srv".into(),
            test: true,
            ..BuildRequest::default()
        };
        let mut builder = Builder::new(&ORDER, &request);
        let parsed = parse_text(&mut Sources::new(), &mut NoFiles, "test", text.into(), Path::new("/"));
        builder.walk(&parsed.statements, Contexts::MAIN, ScopeRef::Main);
        let errors: Vec<String> = builder.diagnostics.iter().map(|error| error.message.clone()).collect();
        if errors.is_empty() { Ok(builder) } else { Err(errors) }
    }

    /// Returns the settings of a scope after `merge` with its parent's.
    fn merged(builder: &mut Builder, scope: u32, parent: Option<&Conf>) -> Conf {
        let confs = builder.http_mut().confs(ScopeId(scope));
        let conf = confs.iter_mut().flatten().find_map(|conf| conf.downcast_mut::<Conf>());
        let mut conf = conf.map(std::mem::take).unwrap_or_default();
        merge(&mut conf, parent.map(|parent| parent as &dyn Any), builder).unwrap();
        conf
    }

    fn file(log: &Log<Request>) -> &DeferredLog {
        match &log.target {
            LogTarget::File(file, _) => file,
            LogTarget::Named(_) | LogTarget::Syslog(_) => panic!("no file"),
        }
    }

    fn paths(conf: &Conf) -> Vec<&str> {
        conf.logs().iter().map(|log| file(log).path().to_str().unwrap()).collect()
    }

    fn error(text: &str) -> String {
        match read(text) {
            Ok(_) => panic!("accepted: {text}"),
            Err(errors) => errors.join("; "),
        }
    }

    static ORDER: Order = Order { modules: &[&crate::http::core::MODULE, &MODULE], protocols: &[], figures: None };

    struct NoFiles;

    impl Files for NoFiles {
        fn read(&mut self, _: &Path) -> io::Result<Vec<u8>> {
            Err(io::ErrorKind::NotFound.into())
        }

        fn glob(&mut self, _: &Path) -> io::Result<Vec<PathBuf>> {
            Ok(Vec::new())
        }
    }

    #[test]
    fn wrong_formats_are_refused_in_nginx_s_words() {
        assert_eq!(error("http { log_format a escape=xml $uri; }"), "unknown log format escaping \"xml\"");
        assert_eq!(error("http { log_format a x; log_format a x; }"), "duplicate \"log_format\" name \"a\"");
        assert_eq!(error("http { log_format combined x; }"), "duplicate \"log_format\" name \"combined\"");
    }

    #[test]
    fn a_format_must_be_known_where_it_is_used() {
        assert!(read("http { log_format a x; server { access_log l A; location / { access_log l a; } } }").is_ok());
        assert_eq!(error("http { access_log l a; log_format a x; }"), "unknown log format \"a\"");
    }

    #[test]
    fn parameters_are_judged_in_nginx_s_words() {
        let message = |parameters: &str| error(&format!("http {{ access_log {parameters}; }}"));
        assert_eq!(message("off x"), "invalid parameter \"x\"");
        assert_eq!(message("l combined x=1"), "invalid parameter \"x=1\"");
        assert_eq!(message("l combined buffer=0"), "invalid buffer size \"0\"");
        assert_eq!(message("l combined buffer=4k flush=x"), "invalid flush time \"x\"");
        assert_eq!(message("l combined flush=1m"), "no buffer is defined for access_log \"l\"");
        assert_eq!(message("l combined gzip=0"), "invalid compression level \"0\"");
        assert_eq!(message("l combined gzip=10"), "invalid compression level \"10\"");
        assert_eq!(message("syslog:x"), "unknown syslog parameter \"x\"");
        assert_eq!(message("syslog:server=127.0.0.1 combined buffer=1k"), "logs to syslog cannot be buffered");
        assert_eq!(message("l$uri combined gzip"), "buffered logs cannot have variables in name");
    }

    #[test]
    fn a_file_has_one_buffer() {
        let twice = |one: &str, other: &str| {
            read(&format!("http {{ access_log l combined {one}; server {{ access_log /srv/l combined {other}; }} }}"))
        };
        assert!(twice("buffer=4k flush=1s", "flush=1s buffer=4096").is_ok());
        assert!(twice("buffer=4k", "").is_ok());
        let errors = twice("buffer=4k", "buffer=8k").err().unwrap();
        assert_eq!(errors, ["access_log \"/srv/l\" already defined with conflicting parameters"]);
        let stderr = "http { access_log '' combined buffer=4k; access_log '' combined buffer=8k gzip flush=1s; }";
        // Only this warning.
        let noted = read(stderr).err().unwrap();
        assert_eq!(noted, ["\"gzip\" has no effect on standard error, which is shared with other logs"]);
    }

    #[test]
    fn logs_of_a_block_replace_those_of_the_block_around_it() {
        let text = "http { access_log a; access_log b combined buffer=1m if=$uri;
                    server { location / { access_log c; } }
                    server { access_log off; access_log c; location / { } } }";
        let mut builder = read(text).unwrap();
        let http = merged(&mut builder, 0, None);
        assert_eq!(paths(&http), ["/srv/a", "/srv/b"]);
        let server = merged(&mut builder, 1, Some(&http));
        assert_eq!(paths(&server), ["/srv/a", "/srv/b"]);
        assert_eq!(paths(&merged(&mut builder, 2, Some(&server))), ["/srv/c"]);
        let off = merged(&mut builder, 3, Some(&http));
        assert!(off.logs().is_empty());
        assert!(merged(&mut builder, 4, Some(&off)).logs().is_empty());
    }

    #[test]
    fn the_default_log_is_that_of_a_server_that_says_nothing() {
        let mut builder = read("http { server { } server { access_log off; } }").unwrap();
        let http = merged(&mut builder, 0, None);
        assert!(http.logs.is_none());
        let server = merged(&mut builder, 1, Some(&http));
        assert_eq!(file(&server.logs()[0]).path(), builder.default_access_log_path());
        assert_eq!(server.logs()[0].format, combined(&mut builder).unwrap());
        assert!(merged(&mut builder, 2, Some(&http)).logs().is_empty());
    }

    #[test]
    fn conditions_are_false_when_empty_or_zero() {
        assert!(is_false(b"") && is_false(b"0"));
        assert!(!is_false(b"00") && !is_false(b"1") && !is_false(b" "));
    }
}
