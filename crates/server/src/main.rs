//! The program: command line and list of modules.
//!
//! nginx's options have the same meaning here. A binary started under the name `nginx` prints nginx's messages, because
//! other programs parse them.

mod allocator;
mod arguments;
mod check;
mod directives;
mod health;
mod quick;
mod version;

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use gale_config::DiskFiles;
use gale_engine::configuration;
use gale_engine::serve::Server;
use gale_modules::order::ORDER;
use gale_process::BuildRequest;

use self::arguments::{Action, Arguments, Top};

fn main() -> ExitCode {
    allocator::give_back_at_once();
    // A process started by a master has no command line of its own.
    if let Some(role) = gale_process::inherited_role() {
        return gale_process::run_role(role, Server::new(&ORDER));
    }
    let arguments = match Arguments::parse(std::env::args_os()) {
        Ok(arguments) => arguments,
        Err(error) => {
            eprintln!("{error}");
            return ExitCode::FAILURE;
        }
    };
    match &arguments.action {
        Action::Help(of) => {
            print_to(&mut std::io::stdout(), &arguments.help(*of));
            ExitCode::SUCCESS
        }
        Action::Version => {
            print_to(&mut std::io::stderr(), &format!("{}\n", version::short(arguments.is_nginx())));
            ExitCode::SUCCESS
        }
        Action::VersionAndBuild => {
            print_to(&mut std::io::stderr(), &version::long(arguments.is_nginx()));
            ExitCode::SUCCESS
        }
        Action::Check(check) => check::print(check),
        Action::Health(health) => health::ask(health),
        Action::Directives(form) => directives::print(form),
        Action::Serve(serve) => quick::serve(serve),
        Action::Test { prints_texts } => test(&arguments, *prints_texts),
        Action::Signal(command) => signal(&arguments, *command),
        Action::Reload => reload(&arguments),
        Action::Top(of) => top(&arguments, of),
        Action::Start => gale_process::start(Server::new(&ORDER), request(&arguments)),
    }
}

/// Prints and ignores errors: the reader may close the pipe early.
fn print_to(out: &mut impl Write, text: &str) {
    let _ = out.write_all(text.as_bytes());
}

fn request(arguments: &Arguments) -> BuildRequest {
    BuildRequest {
        program: arguments.program.clone(),
        configuration_path: arguments.configuration_path(),
        prefix: arguments.prefix(),
        global_directives: arguments.global_directives.clone().unwrap_or_default(),
        error_log_path: arguments.error_log.clone(),
        privileged: gale_process::is_super_user(),
        test: matches!(arguments.action, Action::Test { .. }),
        configuration_text: None,
    }
}

/// `-t` and `-T`
fn test(arguments: &Arguments, prints_texts: bool) -> ExitCode {
    let request = request(arguments);
    let path = request.configuration_path.display().to_string();
    let program = request.program.clone();
    let server = Server::new(&ORDER);
    match gale_process::test(&server, request) {
        Ok(built) => {
            if !arguments.is_quiet {
                eprint!("{}", built.warnings.render(&program));
                eprintln!("{program}: the configuration file {path} syntax is ok");
                eprintln!("{program}: configuration file {path} test is successful");
            }
            if prints_texts {
                print_texts(&server);
            }
            // Skips freeing the memory of possibly thousands of locations, since the process exits now.
            std::mem::forget(built);
            ExitCode::SUCCESS
        }
        Err(report) => {
            eprint!("{}", report.render(&program));
            eprintln!("{program}: configuration file {path} test failed");
            ExitCode::FAILURE
        }
    }
}

fn print_texts(server: &Server) {
    let mut out = std::io::stdout().lock();
    for (path, text) in server.take_texts().unwrap_or_default() {
        // Output errors are ignored: the reader may close the pipe early.
        let _ = writeln!(out, "# configuration file {}:", path.display());
        let _ = out.write_all(&text);
        let _ = writeln!(out);
    }
}

/// `-s`
fn signal(arguments: &Arguments, command: gale_process::Command) -> ExitCode {
    let sent = pid_path(arguments).map(|path| gale_process::send_signal(&path, command));
    match sent {
        Some(Ok(())) => ExitCode::SUCCESS,
        Some(Err(error)) => {
            eprintln!("{}: {error}", arguments.program);
            ExitCode::FAILURE
        }
        None => ExitCode::FAILURE,
    }
}

/// `gale reload`
fn reload(arguments: &Arguments) -> ExitCode {
    let program = &arguments.program;
    let is_in_force = match pid_path(arguments).map(|path| gale_process::reload(&path)) {
        Some(Ok(reloaded)) => {
            eprint!("{}", reloaded.text);
            reloaded.is_in_force
        }
        Some(Err(error)) => {
            eprintln!("{program}: {error}");
            return ExitCode::FAILURE;
        }
        // The configuration is invalid, so no reload is requested.
        None => false,
    };
    let (which, code) = if is_in_force { ("new", ExitCode::SUCCESS) } else { ("old", ExitCode::FAILURE) };
    eprintln!("{program}: the {which} configuration {} in force", if is_in_force { "is" } else { "stays" });
    code
}

/// `gale top`
fn top(arguments: &Arguments, of: &Top) -> ExitCode {
    let source = match &of.url {
        Some(url) => gale_top::of_url(url),
        None => {
            let Some(path) = pid_path(arguments) else { return ExitCode::FAILURE };
            // Reads the pid file each time, because an upgrade changes the process.
            Ok(Box::new(move || gale_process::status(&path).map_err(|error| error.message)) as gale_top::Source)
        }
    };
    let options = gale_top::Options { interval: of.interval, is_once: of.is_once };
    match source.and_then(|source| gale_top::run(source, &options)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{}: {error}", arguments.program);
            ExitCode::FAILURE
        }
    }
}

/// Returns the path of the pid file from the configuration, or prints the configuration's errors.
fn pid_path(arguments: &Arguments) -> Option<PathBuf> {
    let settings = configuration::main_settings(&ORDER, &request(arguments), &mut DiskFiles);
    settings.map(|settings| settings.pid_path).map_err(|report| eprint!("{}", report.render(&arguments.program))).ok()
}
